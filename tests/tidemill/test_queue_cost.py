"""What a move costs the server must not grow with what waits. Counted in commands, so never flaky."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import REPLY, WORKER, make_job, make_settings, sibling, submit
from tests.tidemill.servers import Server
from tidemill.connection import connect
from tidemill.queue import Queue

FEW, MANY = 20, 1000


@pytest.fixture
async def redis(valkey: Server) -> AsyncIterator[Redis]:
    client = connect(valkey.url)
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


async def test_jobs_submitted_together_share_the_cost_of_a_script(redis: Redis, queue_name: str) -> None:
    queue = Queue(redis, queue_name, make_settings())
    jobs = [make_job(f"j{i}") for i in range(100)]

    one = await commands(redis, queue.submit(jobs[:1], reply_to=REPLY))
    many = await commands(redis, queue.submit(jobs[1:], reply_to=REPLY))

    assert many < 0.8 * one * (len(jobs) - 1)
