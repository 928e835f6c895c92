"""The blocking face: the same methods, from threads without an event loop."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest

from tests.tidemill.echo_worker import FAIL, echo_worker
from tests.tidemill.factories import make_job
from tests.tidemill.servers import Server, free_port
from tidemill.blocking import BlockingClient
from tidemill.client import Client, ClientSettings
from tidemill.errors import ConfigurationError, JobConflict, JobUnknown, QueueUnavailable, TidemillError
from tidemill.jobs import Job, JobId, Status
from tidemill.moves import CancelOutcome, JobState


@pytest.fixture
def client(valkey: Server, queue_name: str) -> Iterator[BlockingClient]:
    with BlockingClient(valkey.url, queue=queue_name) as made:
        yield made


@pytest.fixture
def worker(valkey: Server, queue_name: str) -> Iterator[None]:
    with echo_worker(valkey.url, queue_name):
        yield


def public_methods(kind: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_faces_have_the_same_methods() -> None:
    assert public_methods(BlockingClient) == public_methods(Client)
    assert inspect.signature(BlockingClient) == inspect.signature(Client)


@pytest.mark.usefixtures("worker")
def test_a_job_is_answered(client: BlockingClient) -> None:
    job_id = client.submit(make_job("a", prompt="echo"))
    assert client.result(job_id, timeout=10).text == "echo"
    assert client.status(job_id).state is JobState.DONE


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Strikes the main thread, as Ctrl-C does, a moment after it is called."""

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, strike)
    yield threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start
    signal.signal(signal.SIGUSR1, before)


def test_an_interrupted_wait_ends_as_interrupted(
    client: BlockingClient, interrupt: Callable[[], None]
) -> None:
    """Not in an error of the iteration, which was still on its way out when it was closed."""
    job_ids = [client.submit(make_job(f"j{number}")) for number in range(3)]
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        list(client.as_completed(job_ids))
    assert client.status(job_ids[0]).state is JobState.WAITING


def test_an_interrupt_before_the_wait_begins_is_no_deadlock(
    client: BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given one that strikes when a step is on its way, and nobody holds what would cancel it."""
    job_id = client.submit(make_job("a"))
    begin = asyncio.run_coroutine_threadsafe

    def interrupted(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> NoReturn:
        monkeypatch.undo()
        begin(work, loop)
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(client.as_completed([job_id]))
    assert client.status(job_id).state is JobState.WAITING


@pytest.mark.usefixtures("worker")
def test_a_stream_is_read(client: BlockingClient) -> None:
    job_id = client.submit(make_job("a", prompt="echo", stream=True))
    assert "".join(delta.text for delta in client.stream(job_id)) == "echo"


@pytest.mark.usefixtures("worker")
def test_submission_and_answers_overlap(valkey: Server, queue_name: str) -> None:
    """Given many more jobs than the window, the natural composition neither hangs nor hoards."""
    settings = ClientSettings(window=10)
    with BlockingClient(valkey.url, queue=queue_name, settings=settings) as client:
        jobs = (make_job(f"job-{number}", prompt=f"text {number}") for number in range(100))
        results = client.as_completed(client.submit_many(jobs, batch=5), timeout=20)
        assert {result.text for result in results} == {f"text {number}" for number in range(100)}


@pytest.mark.usefixtures("worker")
def test_a_list_of_ids_is_collected(client: BlockingClient) -> None:
    ids = list(client.submit_many([make_job("a"), make_job("b", prompt=FAIL)]))
    outcomes = {result.id: result.status for result in client.as_completed(ids, timeout=10)}
    assert outcomes == {"a": Status.SUCCEEDED, "b": Status.FAILED}


def test_jobs_are_made_and_refusals_told_in_the_calling_thread(client: BlockingClient) -> None:
    client.submit(make_job("b", prompt="was here first"))
    threads: list[int] = []
    refused: list[tuple[Job, TidemillError]] = []

    def jobs() -> Iterator[Job]:
        for name in "abc":
            threads.append(threading.get_ident())
            yield make_job(name)

    def on_error(job: Job, error: TidemillError) -> None:
        threads.append(threading.get_ident())
        refused.append((job, error))

    assert list(client.submit_many(jobs(), on_error=on_error)) == ["a", "c"]
    assert set(threads) == {threading.get_ident()}
    ((job, error),) = refused
    assert job.id == "b"
    assert isinstance(error, JobConflict)


def test_errors_are_raised_as_they_are(client: BlockingClient) -> None:
    with pytest.raises(JobUnknown, match="ghost"):
        client.result(JobId("ghost"))
    with pytest.raises(JobUnknown, match="ghost"):
        next(client.stream(JobId("ghost")))
    with pytest.raises(TimeoutError, match="job a has no result"):
        client.result(client.submit(make_job("a")), timeout=0.01)
    with pytest.raises(TimeoutError, match="unfinished"):
        next(client.as_completed([JobId("a")], timeout=0.01))


def test_the_queue_can_be_looked_at_and_jobs_cancelled(client: BlockingClient) -> None:
    client.ping()
    job_id = client.submit(make_job("a"))
    assert client.depth().total == 1
    assert client.model_card() is None
    assert client.cancel(job_id) is CancelOutcome.CANCELLED
    assert client.depth().total == 0


def test_redis_down_is_told() -> None:
    port = free_port()
    with BlockingClient(f"redis://:hunter2@127.0.0.1:{port}/0", queue="q") as client:
        with pytest.raises(QueueUnavailable, match=f"127.0.0.1:{port} cannot be reached") as caught:
            client.submit(make_job("a"))
        assert "hunter2" not in str(caught.value)


def test_a_wrong_name_starts_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ConfigurationError, match="queue"):
        BlockingClient(queue="two words")
    assert threading.active_count() == before


def test_leaving_an_iterator_early_leaves_the_client_usable(client: BlockingClient) -> None:
    ids = list(client.submit_many(map(make_job, "abc")))
    client.cancel(ids[0])
    results = client.as_completed(ids)
    assert next(results).id == "a"
    results.close()  # type: ignore[attr-defined]
    assert client.depth().total == 2


def test_a_batch_is_submitted_in_one_call(client: BlockingClient) -> None:
    client.submit(make_job("b", prompt="was here first"))
    first, second, third = client.submit_batch([make_job(name) for name in "abc"])
    assert (first, third) == ("a", "c")
    assert isinstance(second, JobConflict)


ABANDONED = """
import itertools, os, sys
from tidemill import BlockingClient, ClientSettings, Job
client = BlockingClient(sys.argv[1], queue=sys.argv[2], settings=ClientSettings(window=4))
jobs = (Job(prompt="echo", stream=True) for _ in itertools.count())
ids = client.submit_many(jobs, batch=2)
walk = {walk}
next(walk)
{leave}
"""
WALKS = {
    "stream": "client.stream(next(ids))",
    "overlapping": "client.as_completed(ids)",
}
LEAVES = {
    "closed, then dropped": "client.close(); del walk, ids",
    "closed, never dropped": "client.close()",
    "dropped, then closed": "del walk, ids; client.close()",
    "collected amid a call": "with client._lock:\n    del walk, ids\nclient.close()",
    "dropped by a child": "if os.fork() == 0:\n    del walk, ids\n    os._exit(0)\nos.wait(); client.close()",
}


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_an_iterator_that_is_left_early_ends_in_silence(
    valkey: Server, queue_name: str, walk: str, leave: str
) -> None:
    """Python tells of an exception in what it throws away on standard error only; and nothing may hang."""
    assert walked_a_step(valkey.url, queue_name, walk, leave) == ("", "")


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_a_process_ends_though_its_client_was_never_closed(
    valkey: Server, queue_name: str, walk: str
) -> None:
    """The loop's thread is dead by then, and whoever waits for it waits for ever."""
    walked_a_step(valkey.url, queue_name, walk, "")


def walked_a_step(url: str, queue: str, walk: str, leave: str) -> tuple[str, str]:
    """What a process prints, on standard output and standard error, that leaves a walk after one step."""
    program = ABANDONED.format(walk=walk, leave=leave)
    run = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, url, queue],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return run.stdout, run.stderr


@pytest.mark.usefixtures("worker")
def test_threads_may_share_a_client(client: BlockingClient) -> None:
    def ask(number: int) -> str:
        return client.result(
            client.submit(make_job(f"job-{number}", prompt=f"text {number}")), timeout=10
        ).text

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(40))) == [f"text {number}" for number in range(40)]


def test_closing_ends_the_thread_and_waits_in_other_threads(valkey: Server, queue_name: str) -> None:
    client = BlockingClient(valkey.url, queue=queue_name)
    job_id = client.submit(make_job("a"))
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(client.result, job_id)
        while not client.status(job_id).replies or not waiting.running():
            pass
        client.close()
        with pytest.raises(QueueUnavailable, match="closed"):
            waiting.result(timeout=5)
    assert not [thread for thread in threading.enumerate() if thread.name == "tidemill-client"]
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.ping()


def test_a_client_made_before_a_fork_works_after_it_unless_it_was_used(
    valkey: Server, queue_name: str
) -> None:
    """A forked child has no thread but its own: waiting for the lost one would never end."""
    program = """
import os, sys
from tidemill import BlockingClient
fresh, used = (BlockingClient(sys.argv[1], queue=sys.argv[2]) for _ in range(2))
used.ping()
if os.fork() == 0:
    fresh.ping()
    try:
        used.ping()
    except RuntimeError as error:
        print("child:", error, flush=True)
    os._exit(0)
os.wait()
used.ping()
print("parent: fine")
"""
    run = subprocess.run(
        [sys.executable, "-c", program, valkey.url, queue_name],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    child, parent = run.stdout.splitlines()
    assert child.startswith("child: this client was used before this process was forked")
    assert parent == "parent: fine"
