"""Reclaiming: only what its holder let lapse, never for ever, and nothing twice."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    WORKER,
    lapse,
    make_due,
    make_job,
    make_late,
    make_result,
    only_result,
    reclaim_after_lapse,
    renewal,
    results_of,
    sibling,
    submit,
    submit_and_claim,
    timeless,
)
from tidemill.errors import ErrorCode
from tidemill.jobs import JobId, Priority, Status
from tidemill.moves import FinishOutcome
from tidemill.queue import Queue


async def test_a_live_lease_is_never_taken(queue: Queue) -> None:
    """redis#13956: XAUTOCLAIM with too short an idle time duplicates."""
    await submit_and_claim(queue)

    assert await queue.reclaim(OTHER, 5) == []


async def test_a_lapsed_job_behind_many_live_ones_is_found_at_once(queue: Queue, redis: Redis) -> None:
    """XAUTOCLAIM from the start with COUNT 1 never reached a stale entry behind 50 live ones."""
    await submit(queue, *(make_job(f"j{i}") for i in range(60)))
    await queue.claim(WORKER, 60)

    (claimed,) = await reclaim_after_lapse(redis, queue, "j59")

    assert claimed.job_id == "j59"


async def test_leases_lapse_by_the_servers_clock(queue: Queue, redis: Redis) -> None:
    """openlinker#2164, taskiq-redis#130: killed after the read, and nobody read again."""
    quick = sibling(queue, redis, lease=0.05)
    await submit_and_claim(quick)
    await asyncio.sleep(0.06)

    assert (await quick.depth()).waiting == 1
    (claimed,) = await quick.reclaim(OTHER, 5)
    assert (claimed.job_id, claimed.attempt) == ("a", 2)
    assert await quick.finish(OTHER, 2, make_result("a")) is FinishOutcome.OK


async def test_reclaim_takes_no_more_than_its_room(queue: Queue, redis: Redis) -> None:
    await submit(queue, *(make_job(name) for name in "abc"))
    await queue.claim(WORKER, 3)
    await lapse(redis, queue, "a", "b", "c")

    assert await queue.reclaim(OTHER, 0) == []
    assert len(await queue.reclaim(OTHER, 2)) == 2
    assert len(await queue.reclaim(OTHER, 2)) == 1


async def test_an_attempt_that_advanced_is_not_counted(queue: Queue, redis: Redis) -> None:
    await submit(queue, make_job("a"))
    (claimed,) = await queue.claim("w0", 1)
    for attempt in range(1, 2 * queue.settings.max_attempts):
        await queue.renew(claimed_by(attempt - 1), [renewal(claimed, 1, start=attempt - 1)])
        (claimed,) = await reclaim_after_lapse(redis, queue, "a", claimed_by(attempt))
        assert claimed.failures == 0


def claimed_by(attempt: int) -> str:
    return f"w{attempt}"


async def test_fruitless_attempts_are_retried_then_delayed_then_buried(queue: Queue, redis: Redis) -> None:
    """worker-vllm#29: a job that kills its worker was retried for ever."""
    first = await submit_and_claim(queue, metadata={"k": "v"})
    (second,) = await reclaim_after_lapse(redis, queue, "a")
    assert await reclaim_after_lapse(redis, queue, "a") == []
    depth = await queue.depth()
    assert (depth.total, depth.delayed) == (1, 1)
    assert await queue.claim(WORKER, 5) == []

    await make_due(redis, queue, "a")
    (third,) = await queue.claim(WORKER, 5)
    assert await queue.begin(WORKER, third.job_id, third.attempt)
    assert await reclaim_after_lapse(redis, queue, "a") == []

    assert [job.attempt for job in (first, second, third)] == [1, 2, 3]
    result = await only_result(queue, "a")
    assert (result.status, result.attempts, result.metadata) == (Status.FAILED, 3, {"k": "v"})
    assert result.error is not None
    assert result.error.code is ErrorCode.ATTEMPTS_EXHAUSTED
    assert (await queue.depth()).dead_letters == 1


async def test_the_backoff_doubles_up_to_its_limit(queue: Queue, redis: Redis) -> None:
    queue = sibling(queue, redis, max_attempts=20, backoff=10, max_backoff=30)
    await submit_and_claim(queue)
    await reclaim_after_lapse(redis, queue, "a")
    waits = []
    for _ in range(4):
        assert await reclaim_after_lapse(redis, queue, "a") == []
        seconds, _ = await redis.time()
        waits.append(await redis.zscore(queue.keys.delayed, "a") / 1000 - seconds)
        await make_due(redis, queue, "a")
        await queue.claim(WORKER, 1)

    assert waits == [pytest.approx(wait, abs=1.5) for wait in (10, 20, 30, 30)]


async def test_a_dead_workers_consumer_is_forgotten(queue: Queue, redis: Redis) -> None:
    """redis#12423: a consumer per process name, never removed."""
    await submit_and_claim(queue)
    await reclaim_after_lapse(redis, queue, "a")

    consumers = await redis.xinfo_consumers(queue.keys.jobs(1, Priority.NORMAL, "default"), "workers")

    assert [consumer["name"].decode() for consumer in consumers] == [OTHER]


async def test_a_consumer_that_holds_jobs_is_not_removed(queue: Queue, redis: Redis) -> None:
    """watermill-redisstream#24, redis#9745: deleting a consumer deletes what it has pending."""
    claimed = await submit_and_claim(queue)

    assert not await queue.remove_consumer(WORKER)
    assert await queue.remove_consumer("stranger")
    (again,) = await reclaim_after_lapse(redis, queue, "a")
    assert again.job_id == claimed.job_id


async def test_a_lapsed_job_whose_stream_entry_is_gone_is_still_reclaimed(queue: Queue, redis: Redis) -> None:
    """redis#6199, #10756: ids pending, bodies gone. redis-py#1191: None, then a TypeError."""
    await submit_and_claim(queue)
    await redis.delete(queue.keys.jobs(1, Priority.NORMAL, "default"))

    (again,) = await reclaim_after_lapse(redis, queue, "a")
    assert await queue.claim(WORKER, 5) == []
    assert await queue.finish(OTHER, again.attempt, make_result("a")) is FinishOutcome.OK


async def test_a_lapsed_job_that_is_cancelled_or_late_ends(queue: Queue, redis: Redis) -> None:
    await submit(queue, make_job("cancelled"), make_job("late", deadline=100))
    await queue.claim(WORKER, 2)
    await queue.cancel(JobId("cancelled"))
    await make_late(redis, queue, "late")
    await lapse(redis, queue, "cancelled", "late")

    assert await queue.reclaim(OTHER, 5) == []
    assert (await only_result(queue, "cancelled")).status is Status.CANCELLED
    assert (await only_result(queue, "late")).status is Status.EXPIRED


async def test_a_repeated_reclaim_brings_the_same_jobs(queue: Queue, redis: Redis) -> None:
    await submit_and_claim(queue)
    twin = sibling(queue, redis)
    twin._series = queue._series

    lost = await reclaim_after_lapse(redis, twin, "a")

    assert timeless(await queue.reclaim(OTHER, 5)) == timeless(lost) != []


@pytest.mark.parametrize("move", ["claim", "reclaim"])
async def test_a_repeat_leaves_no_more_time_than_there_is(queue: Queue, redis: Redis, move: str) -> None:
    """Given a reply that is repeated after ten seconds, then who counts from it does not gain these."""
    await submit(queue, make_job("a", deadline=100))
    twin = sibling(queue, redis)
    twin._series = queue._series
    if move == "reclaim":
        await queue.claim(WORKER, 1)
        await lapse(redis, queue, "a")
    (lost,) = await getattr(twin, move)(OTHER, 1)
    ago = {"claimed": lost.claimed_ms - 10_000, "deadline": lost.deadline_ms - 10_000}
    await redis.hset(queue.keys.job(lost.job_id), mapping=ago)

    (found,) = await getattr(queue, move)(OTHER, 1)

    assert found.deadline_ms == lost.deadline_ms - 10_000
    assert found.deadline_ms - found.claimed_ms <= 90_000


async def test_nothing_is_reclaimed_within_a_lease_of_the_servers_start(queue: Queue, redis: Redis) -> None:
    """Idle time ran on while the server was down: 5 of 5 live jobs were stolen."""
    claimed = await submit_and_claim(queue)
    uptime = (await redis.info("server"))["uptime_in_seconds"]
    careful = sibling(queue, redis, lease=uptime + 60)

    assert await reclaim_after_lapse(redis, careful, "a") == []
    assert await queue.finish(WORKER, claimed.attempt, make_result("a")) is FinishOutcome.OK


async def test_a_second_that_has_only_begun_is_no_age_of_the_server(queue: Queue, redis: Redis) -> None:
    for job_id in (f"j{i}" for i in itertools.count()):
        await submit_and_claim(queue, job_id)
        uptime = (await redis.info("server"))["uptime_in_seconds"]
        found = await reclaim_after_lapse(redis, sibling(queue, redis, lease=uptime), job_id)
        if (await redis.info("server"))["uptime_in_seconds"] == uptime:  # else the second is over
            assert found == []
            break


async def test_nothing_is_reclaimed_within_a_lease_of_a_change_of_servers(queue: Queue, redis: Redis) -> None:
    """One that loads for long, or has been a replica, is old when it first answers. The leases ran on."""
    claimed = await submit_and_claim(queue)
    assert await queue.reclaim(OTHER, 5) == []
    ((run_id, since),) = (await redis.hgetall(queue.keys.server)).items()
    assert (run_id.decode(), since) == ((await redis.info("server"))["run_id"], b"0")
    await redis.hdel(queue.keys.server, run_id)
    await redis.hset(queue.keys.server, "its-predecessor", "0")

    assert await reclaim_after_lapse(redis, queue, "a") == []
    assert await queue.reclaim(WORKER, 5) == []
    assert await redis.hkeys(queue.keys.server) == [run_id]
    await redis.hincrby(queue.keys.server, run_id, -int(queue.settings.lease * 1000))
    assert [job.attempt for job in await queue.reclaim(OTHER, 5)] == [claimed.attempt + 1]


async def test_results_are_exactly_one_each_under_contention(queue: Queue, redis: Redis) -> None:
    """Zombies, repeats and reclaims at once; MULTI in place of a script gave 208 of 400 twice."""
    queue = sibling(queue, redis, backoff=0.001)
    names = [f"j{i}" for i in range(40)]
    await submit(queue, *map(make_job, names))

    async def work(worker: str) -> None:
        while (depth := await queue.depth()).total + depth.running:
            held = await queue.claim(worker, 3) + await queue.reclaim(worker, 3)
            await lapse_some(redis, queue, [job.job_id for job in held][::2])
            for job in held:
                result = make_result(job.job_id)
                if await queue.finish(worker, job.attempt, result) is FinishOutcome.OK:
                    assert await queue.finish(worker, job.attempt, result) is FinishOutcome.ALREADY

    await asyncio.gather(*(work(f"w{i}") for i in range(6)))
    for name in names:
        assert len(await results_of(queue, name)) == 1


async def lapse_some(redis: Redis, queue: Queue, job_ids: list[str]) -> None:
    if job_ids:
        await redis.zadd(queue.keys.leases, dict.fromkeys(job_ids, 1), xx=True)


async def test_a_running_job_whose_hash_was_evicted_is_answered_and_cleared_away(
    queue: Queue, redis: Redis
) -> None:
    """asynq#799, #1144: evictions in mid-run left jobs active for ever."""
    await submit(queue, make_job("a"), make_job("b"))
    await queue.claim(WORKER, 2)
    await redis.delete(queue.keys.job(JobId("a")))

    assert await reclaim_after_lapse(redis, queue, "a") == []

    result = await only_result(queue, "a", "default")
    assert result.error is not None
    assert result.error.code is ErrorCode.UNDECODABLE
    assert await queue.finish(WORKER, 1, make_result("b")) is FinishOutcome.OK
    assert (await queue.depth()).running == 0
    assert await redis.exists(queue.keys.load) == 0


async def test_an_evicted_job_does_not_count_for_ever(queue: Queue, redis: Redis) -> None:
    await submit_and_claim(queue)
    await redis.delete(queue.keys.job(JobId("a")))
    await reclaim_after_lapse(redis, queue, "a")
    await submit(queue, make_job("b"))
    await redis.delete(queue.keys.job(JobId("b")))
    assert await queue.claim(WORKER, 1) == []

    assert await redis.exists(queue.keys.load) == 0
