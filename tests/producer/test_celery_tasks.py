"""Given a real Celery worker and broker, and a served queue, what the tasks do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError

from tests.processes import confined
from tests.producer.celery_app import user_app
from tests.producer.factories import ENGLISH, make_text
from tests.producer.fake_worker import FakeWorker, brief, brief_of, serving_in_thread
from tests.tidemill.servers import Server
from tidemill.blocking import BlockingClient
from tidemill.errors import ConfigurationError, JobUnknown
from tidemill.jobs import Job, JobId
from tidemill_producer.celery_tasks import GENERATE, GenerationFailed, generate, summarize, task_digest
from tidemill_producer.settings import celery_settings

# Celery's result backend and broker transport call commands that redis-py has newer names for.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated (setex|hmset):DeprecationWarning")

SECONDS = 20


@pytest.fixture
def worker(server: Server, queue: str) -> Iterator[FakeWorker]:
    with serving_in_thread(server.url, queue) as worker:
        yield worker


@pytest.fixture(scope="module")
def running_app(server: Server) -> Iterator[Celery]:
    with (
        user_app(server.url, f"test-{uuid.uuid4().hex}") as app,
        start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=SECONDS),
    ):
        yield app


@pytest.fixture
def app(server: Server, running_app: Celery, queue: str) -> Celery:
    """An application whose worker runs in this process, set to the test's own queue."""
    running_app.conf.update(tidemill_queue=queue, tidemill_redis_url=server.url)
    return running_app


@contextmanager
def worker_process(server: Server, queue: str, pool: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "celery", "-A", "tests.producer.celery_app", "worker"]
    environment = os.environ | {"CELERY_TEST_URL": server.url, "CELERY_TEST_QUEUE": queue}
    arguments = ["--pool", pool, "--concurrency", "1", "--loglevel", "ERROR"]
    with confined(subprocess.Popen([*command, *arguments], env=environment)) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(SECONDS)


def holding() -> tuple[Callable[[Job], str | None], threading.Event]:
    """An answer that never comes, and the moment in which it is asked for."""
    held = threading.Event()

    def answer(_: Job) -> None:
        held.set()

    return answer, held


def await_cancellation(client: BlockingClient, job_id: str) -> None:
    limit = time.monotonic() + SECONDS
    while not client.status(JobId(job_id)).cancel_requested:
        assert time.monotonic() < limit, "nobody asked for it"
        time.sleep(0.05)


def test_generate_returns_the_result_as_json(app: Celery, worker: FakeWorker) -> None:
    sent = app.send_task(GENERATE, kwargs={"prompt": "Once", "params": {"max_tokens": 9}, "tenant": "acme"})
    answer = sent.get(timeout=SECONDS)

    assert (answer["text"], answer["status"]) == (brief_of("Once"), "succeeded")
    assert answer["usage"] == {"prompt_tokens": 100, "completion_tokens": 7, "cached_tokens": 64}
    (job,) = worker.jobs
    assert (job.prompt, job.params.max_tokens, job.tenant) == ("Once", 9, "acme")
    assert answer["id"] == job.id == task_digest(sent.id)


def test_a_task_delivered_twice_generates_once(app: Celery, worker: FakeWorker) -> None:
    task_id = str(uuid.uuid4())
    sent = [app.send_task(GENERATE, kwargs={"prompt": "Once"}, task_id=task_id) for _ in range(2)]

    assert {result.get(timeout=SECONDS)["text"] for result in sent} == {brief_of("Once")}
    marker = app.send_task(GENERATE, kwargs={"prompt": "Last"})
    marker.get(timeout=SECONDS)
    assert [job.prompt for job in worker.jobs] == ["Once", "Last"]


def test_an_own_id_is_kept(app: Celery, worker: FakeWorker) -> None:
    answer = app.send_task(GENERATE, kwargs={"prompt": "Once", "id": "order-7"}).get(timeout=SECONDS)

    assert answer["id"] == worker.jobs[0].id == "order-7"


def test_a_failed_job_fails_its_task_with_the_reason(app: Celery, worker: FakeWorker) -> None:
    def refuse(_: Job) -> str:
        raise RuntimeError("the wheel is stuck")

    worker.answer = refuse
    with pytest.raises(GenerationFailed, match="internal: the wheel is stuck"):
        app.send_task(GENERATE, kwargs={"prompt": "Once"}).get(timeout=SECONDS)


def test_a_wrong_field_is_named(app: Celery, worker: FakeWorker) -> None:
    with pytest.raises(Exception, match=r"params.max_tokens: Input should be greater than or equal to 1"):
        app.send_task(GENERATE, kwargs={"prompt": "x", "params": {"max_tokens": 0}}).get(timeout=SECONDS)
    assert worker.jobs == []


def test_summarize_returns_the_summary_and_what_it_took(app: Celery, worker: FakeWorker) -> None:
    options = {"max_tokens": 40, "chunk_tokens": 120}
    answer = app.send_task("tidemill.summarize", [make_text(20)], options).get(timeout=SECONDS)

    assert answer["summary"] == brief(worker.jobs[-1])
    assert answer["jobs"] == len(worker.jobs) > answer["chunks"] > 3


def test_a_summary_delivered_twice_is_computed_once(app: Celery, worker: FakeWorker) -> None:
    task_id = str(uuid.uuid4())
    for _ in range(2):
        app.send_task("tidemill.summarize", [ENGLISH], task_id=task_id).get(timeout=SECONDS)
        app.AsyncResult(task_id).forget()
    app.send_task(GENERATE, kwargs={"prompt": "Last"}).get(timeout=SECONDS)

    assert len(worker.jobs) == 2


def test_tasks_can_be_called_as_functions(
    server: Server, queue: str, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", server.url)

    assert generate(prompt="Once", tidemill_queue=queue)["text"] == brief_of("Once")
    assert summarize(ENGLISH, tidemill_queue=queue)["summary"] == brief_of(ENGLISH.strip())


def test_a_killed_worker_s_task_is_delivered_again_and_finds_its_job(server: Server, queue: str) -> None:
    """celery#5935 and its kin: redelivery must not mean repetition."""
    answer, held = holding()
    with user_app(server.url, queue) as app, serving_in_thread(server.url, queue, answer) as worker:
        with worker_process(server, queue, "solo") as first:
            sent = app.send_task(GENERATE, kwargs={"prompt": "Once"})
            assert held.wait(SECONDS)
            first.kill()
        time.sleep(2.1)  # the broker's visibility timeout
        with worker_process(server, queue, "solo"):
            worker.answer = brief
            worker.answer_held_soon()
            result = sent.get(timeout=SECONDS)

    assert result["text"] == brief_of("Once")
    assert worker.claims == {task_digest(sent.id): 1}


def test_a_task_past_its_time_or_revoked_cancels_its_jobs(server: Server, queue: str) -> None:
    answer, held = holding()
    with (
        user_app(server.url, queue) as app,
        serving_in_thread(server.url, queue, answer) as worker,
        worker_process(server, queue, "prefork"),
        BlockingClient(server.url, queue=queue) as client,
    ):
        late = app.send_task(GENERATE, kwargs={"prompt": "late"}, soft_time_limit=1)
        with pytest.raises(SoftTimeLimitExceeded):
            late.get(timeout=SECONDS)
        await_cancellation(client, str(task_digest(late.id)))

        worker.jobs.clear()
        long = app.send_task("tidemill.summarize", [ENGLISH], soft_time_limit=1)
        with pytest.raises(SoftTimeLimitExceeded):
            long.get(timeout=SECONDS)
        await_cancellation(client, worker.jobs[0].id)

        held.clear()
        revoked = app.send_task(GENERATE, kwargs={"prompt": "revoked"})
        assert held.wait(SECONDS)
        revoked.revoke(terminate=True)
        with pytest.raises(TaskRevokedError):
            revoked.get(timeout=SECONDS)
        await_cancellation(client, str(task_digest(revoked.id)))


def test_a_queue_that_is_away_is_tried_again(server: Server, app: Celery, worker: FakeWorker) -> None:
    """Given Redis out of reach, when a task runs, then it is retried instead of failed."""
    app.conf.tidemill_redis_url = "redis://127.0.0.1:1/0"
    sent = app.send_task(GENERATE, kwargs={"prompt": "Once"})
    limit = time.monotonic() + SECONDS
    while sent.state != "RETRY" and time.monotonic() < limit:
        time.sleep(0.05)
    app.conf.tidemill_redis_url = server.url

    assert sent.get(timeout=SECONDS)["text"] == brief_of("Once")


def test_a_job_that_is_lost_fails_its_task_instead_of_holding_it(
    server: Server, app: Celery, queue: str
) -> None:
    """Given a server that loses its data while a task waits, the task learns of it, and does not wait on."""
    answer, held = holding()
    with serving_in_thread(server.url, queue, answer):
        sent = app.send_task(GENERATE, kwargs={"prompt": "Once"})
        assert held.wait(SECONDS)
        with server.client() as redis:
            redis.delete(*redis.keys(f"tidemill:{{{queue}}}:*"))
        with pytest.raises(JobUnknown, match=str(task_digest(sent.id))):
            sent.get(timeout=SECONDS)


def test_settings_come_from_celery_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="tidemill_queue is not set"):
        celery_settings({})
    monkeypatch.setenv("TIDEMILL_QUEUE", "of-environment")
    monkeypatch.setenv("REDIS_URL", "redis://environment/0")
    assert celery_settings({}).queue == "of-environment"
    assert celery_settings({}).redis_url == "redis://environment/0"

    settings = celery_settings({"tidemill_queue": "of-celery", "tidemill_redis_url": "redis://celery/0"})
    assert (settings.queue, settings.redis_url) == ("of-celery", "redis://celery/0")
    assert celery_settings({}, queue="of-call").queue == "of-call"


def test_a_django_namespace_works() -> None:
    app = Celery("shop", set_as_current=False)
    app.config_from_object(SimpleNamespace(CELERY_TIDEMILL_QUEUE="smollm2"), namespace="CELERY")
    assert celery_settings(app.conf).queue == "smollm2"
    app.close()
