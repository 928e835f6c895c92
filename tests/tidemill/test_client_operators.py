"""What an operator asks of a queue: who serves it, and what becomes of jobs that were given up."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import OTHER, WORKER, make_job, make_settings, reclaim_after_lapse, submit
from tests.tidemill.servers import Server
from tidemill.client import Client
from tidemill.connection import connect
from tidemill.errors import JobUnknown
from tidemill.jobs import JobId
from tidemill.queue import Queue
from tidemill.registry import WorkerReport, WorkerState


@pytest.fixture
async def client(valkey: Server, queue_name: str) -> AsyncIterator[Client]:
    async with Client(valkey.url, queue=queue_name, results="operator") as made:
        yield made


@pytest.fixture
async def redis(valkey: Server) -> AsyncIterator[Redis]:
    made = connect(valkey.url)
    yield made
    await made.aclose()


@pytest.fixture
async def queue(redis: Redis, queue_name: str) -> AsyncIterator[Queue]:
    """The worker's side, on which a job is given up at its first failure."""
    made = Queue(redis, queue_name, make_settings(max_attempts=1))
    yield made
    await made.aclose()


async def bury(redis: Redis, queue: Queue, *names: str) -> None:
    for name in names:
        await submit(queue, make_job(name))
        await queue.claim(WORKER, 1)
        assert await reclaim_after_lapse(redis, queue, name) == []


def make_report(name: str, queue: str, **changes: object) -> WorkerReport:
    who = {"name": name, "queue": queue, "model": "m", "host": "mill", "pid": 7, "version": "1"}
    what = {"fingerprint": "f", "device": "cpu", "state": WorkerState.SERVING, "capacity": 8, "kv_usage": 0.5}
    how_much = {"running": 3, "waiting": 1, "held": 4, "unrecorded": 0, "uptime": 60.0, "heartbeat": 5.0}
    return WorkerReport.model_validate(who | what | how_much | changes)


async def test_workers_that_reported_are_listed(client: Client, queue: Queue) -> None:
    assert await client.workers() == []
    reports = [make_report(name, queue.name) for name in (WORKER, OTHER)]
    for report in reversed(reports):
        await queue.report(report)
    views = await client.workers()
    assert [view.report for view in views] == reports
    assert all(0 <= view.age < 10 for view in views)


async def test_dead_letters_are_walked_from_the_oldest_over_all_pages(
    client: Client, queue: Queue, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.client.DEAD_LETTER_COUNT", 2)
    names = [f"job-{number}" for number in range(5)]
    await bury(redis, queue, *names)
    assert [letter.job_id async for letter in client.dead_letters()] == names


async def test_a_dead_letter_is_found_by_either_id(client: Client, queue: Queue, redis: Redis) -> None:
    await bury(redis, queue, "a", "b")
    letter = await client.dead_letter("b")
    assert (letter.job_id, letter.worker, letter.failures) == ("b", WORKER, 1)
    assert await client.dead_letter(letter.entry_id) == letter
    with pytest.raises(JobUnknown, match="there is no dead letter ghost in queue test/"):
        await client.dead_letter("ghost")


async def test_a_requeued_job_is_answered_to_this_client_and_is_no_dead_letter_any_more(
    client: Client, queue: Queue, redis: Redis
) -> None:
    await bury(redis, queue, "a")
    letter = await client.dead_letter("a")
    new_id = await client.requeue(letter)
    assert await client.requeue(letter) == new_id  # as after a reply that was lost
    assert list((await client.status(new_id)).replies) == ["operator"]
    assert (await client.depth()).total == 1
    with pytest.raises(JobUnknown):
        await client.dead_letter("a")


async def test_dead_letters_can_be_forgotten_some_or_all(client: Client, queue: Queue, redis: Redis) -> None:
    await bury(redis, queue, "a", "b", "c")
    first = await client.dead_letter("a")
    assert await client.purge_dead_letters([first.entry_id]) == 1
    assert await client.purge_dead_letters([first.entry_id]) == 0
    assert [letter.job_id async for letter in client.dead_letters()] == ["b", "c"]
    assert await client.purge_dead_letters(None) == 2
    assert (await client.depth()).dead_letters == 0
    assert (await client.result(JobId("a"), timeout=0)).error is not None
