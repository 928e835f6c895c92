"""Submission to a full queue that waits for room, on a real one: of the queue and of a tenant."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from tests.tidemill.echo_worker import echo_worker, finish
from tests.tidemill.factories import make_job
from tests.tidemill.servers import Server
from tidemill.blocking import BlockingClient
from tidemill.client import Client, ClientSettings
from tidemill.errors import InvalidJob, JobConflict, QueueFull, TidemillError
from tidemill.jobs import Job, JobId
from tidemill.moves import QueueSettings
from tidemill.queue import Queue

LIMITS = {"queue": QueueSettings(max_depth=3), "tenant": QueueSettings(max_tenant_depth=3)}
LONG = 60.0
"""Seconds; a guard, never waited out."""


@pytest.fixture(params=LIMITS.values(), ids=LIMITS)
def settings(request: pytest.FixtureRequest) -> ClientSettings:
    """A limit of three jobs, of the queue or of the tenant."""
    return ClientSettings(queue=request.param)


@pytest.fixture
async def client(valkey: Server, queue_name: str, settings: ClientSettings) -> AsyncIterator[Client]:
    async with Client(valkey.url, queue=queue_name, settings=settings) as made:
        yield made


def names(count: int) -> list[str]:
    return [f"job-{number:03}" for number in range(count)]


async def serve(queue: Queue, order: list[str]) -> None:
    """Answer one job at a time, noting which."""
    while True:
        for claimed in await queue.claim("echo", 1):
            order.append(claimed.job_id)
            await finish(queue, claimed)
        await asyncio.sleep(0.001)


async def one_by_one(client: Client, jobs: list[Job]) -> list[JobId]:
    return [await client.submit(job, wait_for_room=LONG) for job in jobs]


async def as_batch(client: Client, jobs: list[Job]) -> list[JobId]:
    outcomes = await client.submit_batch(jobs, wait_for_room=LONG)
    return [outcome for outcome in outcomes if not isinstance(outcome, TidemillError)]


async def as_many(client: Client, jobs: list[Job]) -> list[JobId]:
    return [job_id async for job_id in client.submit_many(jobs, batch=7, wait_for_room=LONG)]


@pytest.mark.parametrize("submit", [one_by_one, as_batch, as_many])
async def test_all_jobs_get_in_and_are_claimed_in_their_order(
    client: Client, worker_side: Queue, submit: Callable[[Client, list[Job]], Awaitable[list[JobId]]]
) -> None:
    order: list[str] = []
    worker = asyncio.create_task(serve(worker_side, order))
    async with asyncio.timeout(LONG):
        assert await submit(client, [make_job(name) for name in names(30)]) == names(30)
        while len(order) < 30:
            await asyncio.sleep(0.001)
    worker.cancel()
    assert order == names(30)


async def test_a_queue_that_stays_full_is_told_when_the_time_is_over(client: Client) -> None:
    await client.submit_batch([make_job(name) for name in names(3)])
    clock = asyncio.get_running_loop().time
    began = clock()
    with pytest.raises(QueueFull) as caught:
        await client.submit(make_job("late"), wait_for_room=0.3)
    assert clock() - began >= 0.3
    assert caught.value.limit == 3
    assert (await client.depth()).total == 3


async def test_other_refusals_do_not_wait_for_room(client: Client, worker_side: Queue) -> None:
    """Given a batch with a conflict and jobs that find no room, the conflict is told before there is room."""
    await client.submit_batch([make_job(name) for name in names(3)])
    refused: list[str] = []
    jobs = [make_job("job-000", prompt="other"), make_job("late")]
    ids = client.submit_many(
        jobs,
        on_error=lambda job, error: refused.append(f"{job.id} {type(error).__name__}"),
        wait_for_room=LONG,
    )
    late = asyncio.ensure_future(anext(ids))
    while not refused:
        await asyncio.sleep(0.001)
    assert refused == ["job-000 JobConflict"]
    assert not late.done()
    (claimed,) = await worker_side.claim("echo", 1)
    await finish(worker_side, claimed)
    assert await late == "late"
    await ids.aclose()


async def test_without_a_callback_another_refusal_is_raised_without_waiting(client: Client) -> None:
    await client.submit_batch([make_job(name) for name in names(3)])
    ids = client.submit_many([make_job("job-000", prompt="other"), make_job("late")], wait_for_room=LONG)
    async with asyncio.timeout(5):
        with pytest.raises(JobConflict, match="job-000"):
            await anext(ids)


async def test_no_more_than_a_batch_is_held_while_room_is_waited_for(
    client: Client, worker_side: Queue
) -> None:
    taken = given = ahead = 0

    def jobs() -> Iterator[Job]:
        nonlocal taken, ahead
        for name in names(60):
            taken += 1
            ahead = max(ahead, taken - given)
            yield make_job(name)

    worker = asyncio.create_task(serve(worker_side, []))
    async for _ in client.submit_many(jobs(), batch=10, wait_for_room=LONG):
        given += 1
    worker.cancel()
    assert (given, ahead) == (60, 10)


def test_the_blocking_client_waits_too(valkey: Server, queue_name: str, settings: ClientSettings) -> None:
    """And `jobs` is still walked, and refusals told, in the calling thread."""
    threads: set[int] = set()
    refused: list[TidemillError] = []

    def jobs() -> Iterator[Job]:
        for name in itertools.chain(names(30), ["bad"]):
            threads.add(threading.get_ident())
            yield make_job(name, prompt="x" * 2**20 if name == "bad" else "x")

    def on_error(_: Job, error: TidemillError) -> None:
        threads.add(threading.get_ident())
        refused.append(error)

    with (
        BlockingClient(valkey.url, queue=queue_name, settings=settings) as client,
        echo_worker(valkey.url, queue_name),
    ):
        ids = list(client.submit_many(jobs(), batch=7, on_error=on_error, wait_for_room=LONG))
        assert ids == names(30)
        assert client.submit(make_job("last"), wait_for_room=LONG) == "last"
    assert threads == {threading.get_ident()}
    assert [type(error) for error in refused] == [InvalidJob]


async def test_a_time_limit_that_is_none_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="wait_for_room"):
        await client.submit(make_job("a"), wait_for_room=-1.0)
