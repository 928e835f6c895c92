"""What a move costs the server must not grow with what waits. Counted in commands, so never flaky."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    REPLY,
    WORKER,
    make_job,
    make_result,
    make_settings,
    renewal,
    sibling,
    submit,
)
from tests.tidemill.servers import Server, running, valkey_binary
from tests.tidemill.simulated_workers import SimulatedWorkers, make_jobs
from tidemill.connection import connect
from tidemill.jobs import JobId, Usage
from tidemill.queue import Queue

FEW, MANY = 20, 1000
TENANTS = 10_000
LINE = 10
"""Jobs of each."""


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """One that need not be cleared of a hundred thousand jobs."""
    with running(valkey_binary()) as server:
        yield server


@pytest.fixture
async def redis(own_server: Server) -> AsyncIterator[Redis]:
    client = connect(own_server.url)
    yield client
    await client.aclose()


async def commands(redis: Redis, move: Awaitable[object]) -> int:
    """Commands that a move made the server execute, those inside its script included."""
    before = await redis.info("commandstats")
    await move
    after = await redis.info("commandstats")
    counts = {name: stat["calls"] - before.get(name, {"calls": 0})["calls"] for name, stat in after.items()}
    counts["cmdstat_info"] = 0
    return sum(counts.values())


async def costs(redis: Redis, queue: Queue) -> dict[str, int]:
    await queue.claim(WORKER, 1)  # makes the group of the first stream; and all are loaded once
    await queue.reclaim(WORKER, 1)
    await queue.depth()
    return {
        "submit": await commands(redis, queue.submit([make_job("new")], reply_to=REPLY)),
        "claim": await commands(redis, queue.claim(WORKER, 4)),
        "reclaim": await commands(redis, queue.reclaim(WORKER, 4)),
        "depth": await commands(redis, queue.depth()),
    }


async def test_no_move_costs_more_for_a_long_line(redis: Redis, queue_name: str) -> None:
    found = []
    for number in (FEW, MANY):
        queue = Queue(redis, f"{queue_name}/{number}", make_settings())
        await submit(queue, *(make_job(f"j{i}") for i in range(number)))
        found.append(await costs(redis, queue))

    assert found[0] == found[1]


async def test_claiming_costs_no_more_for_many_tenants(redis: Redis, queue_name: str) -> None:
    found = []
    for number in (FEW, MANY):
        queue = Queue(redis, f"{queue_name}/{number}", make_settings())
        await submit(queue, *(make_job(f"j{i}", tenant=f"t{i}") for i in range(number)))
        cost = await costs(redis, queue)
        del cost["depth"]  # looks at each tenant's line
        found.append(cost)

    assert found[0] == found[1]


@pytest.mark.timeout(240)
async def test_fairness_costs_no_more_for_ten_thousand_tenants_of_a_hundred_thousand_jobs(
    redis: Redis, queue_name: str
) -> None:
    """A few have been served before, so that there are averages."""
    found = []
    for number in (FEW, TENANTS):
        queue = Queue(redis, f"{queue_name}/{number}", make_settings())
        for first in range(0, number, 500):
            jobs = [
                job
                for tenant in range(first, min(number, first + 500))
                for job in make_jobs(f"t{tenant}", LINE)
            ]
            await queue.submit(jobs, reply_to=REPLY)
        workers = SimulatedWorkers(queue, lambda _: Usage(prompt_tokens=5, completion_tokens=7))
        await workers.run(FEW // 5)
        found.append(await held_costs(redis, queue))

    assert found[0] == found[1]


async def held_costs(redis: Redis, queue: Queue) -> dict[str, int]:
    """What a claim costs, and the moves that report service."""
    first, second = await queue.claim(WORKER, 2)
    await queue.renew("nobody", [renewal(first)])  # all are loaded once
    await queue.release("nobody", [renewal(first)])
    result = make_result(first.job_id, usage=Usage(prompt_tokens=5, completion_tokens=7))
    return {
        "claim": await commands(redis, queue.claim(WORKER, 8)),
        "renew": await commands(redis, queue.renew(WORKER, [renewal(first, 3), renewal(second, 3)])),
        "finish": await commands(redis, queue.finish(WORKER, first.attempt, result)),
        "release": await commands(redis, queue.release(WORKER, [renewal(second, 2, start=3)])),
    }


async def test_an_older_worker_is_not_slowed_down_by_what_waits_for_newer_ones(
    redis: Redis, queue_name: str
) -> None:
    found = []
    for number in (FEW, MANY):
        queue = Queue(redis, f"{queue_name}/{number}", make_settings())
        newer = sibling(queue, redis, wire_version=2)
        await submit(newer, *(make_job(f"n{i}", tenant=f"t{i}") for i in range(number)))
        await submit(queue, *(make_job(f"j{i}") for i in range(FEW)))
        found.append(await costs(redis, queue))
        del found[-1]["depth"]

    assert found[0] == found[1]


async def test_a_waiting_job_is_kept_small(redis: Redis, queue_name: str) -> None:
    """What is at its default takes no memory of the million that may wait."""
    queue = Queue(redis, queue_name, make_settings())
    await submit(queue, make_job("a"))

    fields = {field.decode() for field in await redis.hkeys(queue.keys.job(JobId("a")))}

    assert fields == {
        "state", "payload", "digest", "version", "priority", "tenant", "seed", "replies", "submitted",
        "entry",
    }  # fmt: skip


async def test_asking_for_cancellations_costs_the_same_for_many_jobs(redis: Redis, queue_name: str) -> None:
    queue = Queue(redis, queue_name, make_settings())
    await submit(queue, *(make_job(f"j{i}") for i in range(FEW)))
    await queue.claim(WORKER, FEW)
    await queue.renew(WORKER, [])  # is loaded once

    assert await commands(redis, queue.renew(WORKER, [])) == 3  # the script, its clock, the set


async def test_jobs_submitted_together_share_the_cost_of_a_script(redis: Redis, queue_name: str) -> None:
    queue = Queue(redis, queue_name, make_settings())
    jobs = [make_job(f"j{i}") for i in range(100)]

    one = await commands(redis, queue.submit(jobs[:1], reply_to=REPLY))
    many = await commands(redis, queue.submit(jobs[1:], reply_to=REPLY))

    assert many < 0.8 * one * (len(jobs) - 1)
