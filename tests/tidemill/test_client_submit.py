"""What a client puts into the queue, and what it is told about it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest

from tests.tidemill.echo_worker import open_queue, work
from tests.tidemill.factories import make_job
from tests.tidemill.servers import Server
from tidemill.card import ModelCard
from tidemill.client import Client, ClientSettings
from tidemill.connection import connect
from tidemill.errors import ConfigurationError, InvalidJob, JobConflict, JobUnknown, QueueFull, TidemillError
from tidemill.jobs import Job, JobId, Priority, Status
from tidemill.moves import CancelOutcome, JobState, QueueSettings
from tidemill.queue import Queue


def make_client(server: Server, queue_name: str, **settings: int) -> Client:
    return Client(server.url, queue=queue_name, settings=ClientSettings(queue=QueueSettings(**settings)))


async def test_a_submitted_job_waits_to_be_answered_to_this_client(client: Client) -> None:
    job_id = await client.submit(make_job("a", tenant="team", priority="low"))
    view = await client.status(job_id)
    assert (view.state, view.tenant, view.priority) == (JobState.WAITING, "team", Priority.LOW)
    assert list(view.replies) == [client.results]


async def test_a_reply_name_of_the_job_is_kept(client: Client) -> None:
    await client.submit(make_job("a", reply_to="elsewhere"))
    assert list((await client.status(JobId("a"))).replies) == ["elsewhere"]


async def test_submitting_again_makes_no_second_job(client: Client) -> None:
    for _ in range(3):
        assert await client.submit(make_job("a")) == "a"
    assert (await client.depth()).total == 1


async def test_another_job_under_the_same_id_is_a_conflict(client: Client) -> None:
    await client.submit(make_job("a"))
    with pytest.raises(JobConflict, match="job a "):
        await client.submit(make_job("a", prompt="something else"))


async def test_a_job_too_large_is_refused_with_the_limit(valkey: Server, queue_name: str) -> None:
    async with make_client(valkey, queue_name, max_payload=1000) as client:
        with pytest.raises(InvalidJob, match="1000 are allowed") as caught:
            await client.submit(make_job("a", prompt="x" * 1000))
        assert (caught.value.field, caught.value.limit) == ("payload", 1000)
        assert (await client.depth()).total == 0


async def test_a_full_queue_says_so(valkey: Server, queue_name: str) -> None:
    async with make_client(valkey, queue_name, max_depth=1) as client:
        await client.submit(make_job("a"))
        with pytest.raises(QueueFull) as caught:
            await client.submit(make_job("b"))
        assert caught.value.limit == 1


async def test_one_bad_job_of_a_batch_hinders_no_other(valkey: Server, queue_name: str) -> None:
    async with make_client(valkey, queue_name, max_payload=1000) as client:
        await client.submit(make_job("c", prompt="was here first"))
        jobs = [make_job("a"), make_job("b", prompt="x" * 1000), make_job("c"), make_job("d")]
        outcomes = await client.submit_batch(jobs)
        assert [type(outcome) for outcome in outcomes] == [str, InvalidJob, JobConflict, str]
        assert (await client.depth()).total == 3


async def test_many_jobs_keep_their_order(client: Client) -> None:
    names = [f"job-{number}" for number in range(25)]
    assert [i async for i in client.submit_many(map(make_job, names), batch=10)] == names
    assert (await client.depth()).total == 25


async def test_many_jobs_may_come_from_an_async_iterable(client: Client) -> None:
    async def jobs() -> AsyncIterator[Job]:
        for name in ("a", "b", "c"):
            yield make_job(name)

    assert [i async for i in client.submit_many(jobs(), batch=2)] == ["a", "b", "c"]


async def test_no_more_than_a_batch_is_held(client: Client) -> None:
    """V#30268: memory does not grow with the number of jobs."""
    taken = given = ahead = 0

    def jobs() -> Iterator[Job]:
        nonlocal taken, ahead
        for number in range(200):
            taken += 1
            ahead = max(ahead, taken - given)
            yield make_job(f"job-{number}")

    async for _ in client.submit_many(jobs(), batch=10):
        given += 1
    assert (given, ahead) == (200, 10)


async def test_refused_jobs_go_to_the_callback(client: Client) -> None:
    await client.submit(make_job("b", prompt="was here first"))
    refused: list[tuple[str, TidemillError]] = []
    ids = client.submit_many(
        map(make_job, "abc"), on_error=lambda job, error: refused.append((job.id, error))
    )
    assert [i async for i in ids] == ["a", "c"]
    ((name, error),) = refused
    assert name == "b"
    assert isinstance(error, JobConflict)


async def test_without_a_callback_the_error_comes_after_the_ids_of_its_batch(client: Client) -> None:
    await client.submit(make_job("a", prompt="was here first"))
    ids = client.submit_many(map(make_job, "abcdef"), batch=3)
    assert [await anext(ids), await anext(ids)] == ["b", "c"]
    with pytest.raises(JobConflict, match="job a "):
        await anext(ids)
    assert (await client.depth()).total == 3


async def test_cancelling_a_waiting_job_answers_it(client: Client) -> None:
    job_id = await client.submit(make_job("a"))
    assert await client.cancel(job_id) is CancelOutcome.CANCELLED
    assert (await client.result(job_id, timeout=5)).status is Status.CANCELLED


async def test_cancelling_after_the_result_changes_nothing(
    client: Client, valkey: Server, queue_name: str
) -> None:
    job_id = await client.submit(make_job("a"))
    async with open_queue(valkey.url, queue_name) as queue:
        await work(queue)
    assert await client.cancel(job_id) is CancelOutcome.FINISHED
    assert (await client.result(job_id)).status is Status.SUCCEEDED


async def test_an_unknown_job_is_unknown_to_status_and_cancel(client: Client) -> None:
    with pytest.raises(JobUnknown, match="job ghost is unknown in queue test/"):
        await client.status(JobId("ghost"))
    assert await client.cancel(JobId("ghost")) is CancelOutcome.UNKNOWN


async def test_the_model_card_tells_whether_anybody_serves(
    client: Client, valkey: Server, queue_name: str
) -> None:
    assert await client.model_card() is None
    card = ModelCard(model="m", max_model_len=10, max_total_tokens=20, tokenizer_zlib=b"\0\xff")
    async with open_queue(valkey.url, queue_name) as queue:
        await queue.publish_card(card)
    assert await client.model_card() == card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queue": "two words"}, "queue: 'two words'"),
        ({"queue": "q", "results": "a:b"}, "results: 'a:b'"),
        ({"queue": "q", "url": "http://127.0.0.1"}, "URL"),
    ],
)
def test_names_and_urls_are_checked_at_once(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Client(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a{b}c", "a}", "*", "a?", "[a]", "a\\b", "two words", "a\n", "a\0"])
def test_a_queue_is_named_by_what_means_nothing_else_to_redis(valkey: Server, name: str) -> None:
    """Neither to its hash slots nor to its patterns; whichever side names it."""
    for use in (partial(Client, valkey.url, queue=name), partial(Queue, connect(valkey.url), name)):
        with pytest.raises(ConfigurationError, match=r"^queue: .* is not a name; it must match"):
            use()


@pytest.mark.parametrize("setting", [{"window": 0}, {"max_connections": 0}, {"patience": -1.0}])
def test_settings_are_checked_at_once(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(setting))):
        ClientSettings(**setting)  # type: ignore[arg-type]
