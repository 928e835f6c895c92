"""A claim whose reply was lost: its repeat brings the same jobs, for as long as they are held."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    WORKER,
    ids,
    make_job,
    reclaim_after_lapse,
    sibling,
    submit,
    submit_and_claim,
    timeless,
)
from tidemill.queue import Queue


async def test_a_repeat_after_a_lost_reply_brings_the_same_jobs(queue: Queue, redis: Redis) -> None:
    """A lost reply must not leave jobs with a worker that does not know of them."""
    await submit(queue, *(make_job(name) for name in "abc"))
    twin = sibling(queue, redis)
    twin._series = queue._series

    lost = await twin.claim(WORKER, 2)
    found = await queue.claim(WORKER, 1)

    assert timeless(found) == timeless(lost)
    assert ids(found) == ["a", "b"]
    assert ids(await queue.claim(WORKER, 5)) == ["c"]


async def test_a_reply_that_was_lost_long_ago_brings_the_same_jobs(queue: Queue, redis: Redis) -> None:
    """After an outage of several leases, in which nobody could take the jobs over either."""
    quick = sibling(queue, redis, lease=0.02)
    twin = sibling(quick, redis)
    twin._series = quick._series
    await submit(queue, make_job("a"))
    lost = await twin.claim(WORKER, 1)
    await asyncio.sleep(0.1)

    assert timeless(await quick.claim(WORKER, 1)) == timeless(lost) != []


async def test_a_receipt_lasts_as_long_as_a_result(queue: Queue, redis: Redis) -> None:
    await submit_and_claim(queue)

    left = await redis.pttl(f"{queue.keys.prefix}receipt:{WORKER}")

    assert queue.settings.lease * 1000 < left <= queue.settings.result_ttl * 1000


async def test_a_claim_that_arrives_after_a_later_one_takes_nothing(queue: Queue, redis: Redis) -> None:
    """Nobody waits for its reply any more, so nobody would know of the jobs."""
    await submit(queue, *(make_job(name) for name in "abc"))
    belated = sibling(queue, redis)
    belated._series = queue._series
    await queue.claim(WORKER, 1)
    await queue.claim(WORKER, 1)

    assert await belated.claim(WORKER, 5) == []
    assert ids(await queue.claim(WORKER, 5)) == ["c"]


async def test_a_repeat_brings_only_what_is_still_held(queue: Queue, redis: Redis) -> None:
    await submit(queue, make_job("a"), make_job("b"))
    twin = sibling(queue, redis)
    twin._series = queue._series
    await twin.claim(WORKER, 2)
    await reclaim_after_lapse(redis, queue, "a", OTHER)

    assert ids(await queue.claim(WORKER, 2)) == ["b"]
