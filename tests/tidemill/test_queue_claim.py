"""Claiming: priority first, then the tenant served least (see test_queue_service), and nothing twice."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    REPLY,
    WORKER,
    ids,
    make_due,
    make_job,
    make_late,
    make_result,
    make_settings,
    only_result,
    reclaim_after_lapse,
    renewal,
    sibling,
    submit,
    submit_and_claim,
)
from tidemill.errors import ErrorCode
from tidemill.jobs import Job, JobId, Priority, Status
from tidemill.moves import JobState, Submitted
from tidemill.queue import Queue


async def test_a_claim_takes_up_to_its_room_in_order(queue: Queue) -> None:
    await submit(queue, *(make_job(name) for name in "abc"))

    assert ids(await queue.claim(WORKER, 2)) == ["a", "b"]
    assert ids(await queue.claim(OTHER, 2)) == ["c"]
    assert ids(await queue.claim(OTHER, 2)) == []
    assert ids(await queue.claim(OTHER, 0)) == []


async def test_a_claimed_job_tells_all_that_the_worker_must_know(queue: Queue) -> None:
    job = make_job("a", seed=7, deadline=5, stream=True)
    await submit(queue, job)

    (claimed,) = await queue.claim(WORKER, 1)

    assert Job.from_wire(claimed.payload) == job
    assert (claimed.seed, claimed.attempt, claimed.failures, claimed.stream) == (7, 1, 0, True)
    assert claimed.checkpoint == ()
    assert claimed.deadline_ms == claimed.submitted_ms + 5000
    assert claimed.claimed_ms >= claimed.submitted_ms
    view = await queue.status(job.id)
    assert view is not None
    assert (view.state, view.worker, view.attempt) == (JobState.RUNNING, WORKER, 1)


async def test_higher_priorities_go_first(queue: Queue) -> None:
    """celery#4028, #8673, #8967: priority ignored, randomised, inverted."""
    await submit(queue, *(make_job(p, priority=p) for p in ("low", "normal", "high")))

    assert ids(await queue.claim(WORKER, 3)) == ["high", "normal", "low"]


async def test_a_full_worker_still_takes_what_is_above_its_lowest(queue: Queue) -> None:
    await submit(queue, *(make_job(p, priority=p) for p in ("low", "normal", "high")))

    assert ids(await queue.claim(WORKER, 3, above=Priority.NORMAL)) == ["high"]
    assert ids(await queue.claim(WORKER, 3, above=Priority.HIGH)) == []
    assert ids(await queue.claim(WORKER, 3, above=Priority.LOW)) == ["normal"]


async def test_waiting_long_enough_lifts_a_job_by_a_priority(
    server: object, redis: Redis, queue_name: str
) -> None:
    aged = Queue(redis, queue_name, make_settings(ageing=0.05))
    await submit(aged, make_job("old", priority="low"))
    await asyncio.sleep(0.11)
    await submit(aged, make_job("new", priority="high"))

    assert ids(await aged.claim(WORKER, 1)) == ["old"]


async def test_a_large_tenant_does_not_stand_in_front_of_a_small_one(queue: Queue) -> None:
    await submit(queue, *(make_job(f"big-{i}", tenant="big") for i in range(20)))
    await queue.claim(WORKER, 4)
    await submit(queue, make_job("small", tenant="small"))

    assert "small" in ids(await queue.claim(WORKER, 2))


async def test_tenants_take_turns(queue: Queue) -> None:
    jobs = [make_job(f"{tenant}{i}", tenant=tenant) for tenant in "abc" for i in range(4)]
    await submit(queue, *jobs)

    served = [job_id[0] for job_id in ids(await queue.claim(WORKER, 12))]

    for start in range(0, 12, 3):
        assert sorted(served[start : start + 3]) == ["a", "b", "c"]


async def test_a_tenant_of_twice_the_weight_gets_twice_the_turns(queue: Queue) -> None:
    await queue.set_weight("heavy", 2)
    jobs = [make_job(f"{tenant}-{i}", tenant=tenant) for tenant in ("heavy", "light") for i in range(30)]
    await submit(queue, *jobs)

    served = Counter(job_id.split("-")[0] for job_id in ids(await queue.claim(WORKER, 30)))

    assert served["heavy"] == pytest.approx(20, abs=1)


@pytest.mark.parametrize("weight", [0, -1, 0.009, 100.1, math.inf, math.nan])
async def test_a_weight_under_which_nobody_could_count_is_refused(queue: Queue, weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight must be from 0\.01 to 100"):
        await queue.set_weight("heavy", weight)


async def test_coming_back_again_and_again_gains_no_extra_turns(queue: Queue) -> None:
    """A tenant with one job at a time must not overtake one with a backlog at every turn."""
    await submit(queue, *(make_job(f"backlog-{i}", tenant="z") for i in range(20)))
    served = []
    for i in range(20):
        await queue.submit([make_job(f"single-{i}", tenant="a")], reply_to=REPLY)
        (claimed,) = await queue.claim(WORKER, 1)
        served.append(claimed.job_id.split("-")[0])
        await queue.finish(WORKER, claimed.attempt, make_result(claimed.job_id))

    assert 8 <= served.count("backlog") <= 12


async def test_a_job_of_a_newer_wire_version_waits_for_a_newer_worker(queue: Queue, redis: Redis) -> None:
    newer = sibling(queue, redis, wire_version=2)
    await submit(newer, make_job("new"))
    await submit(queue, make_job("old"))

    assert ids(await queue.claim(WORKER, 5)) == ["old"]
    assert sorted(ids(await newer.claim(OTHER, 5))) == ["new"]
    assert await reclaim_after_lapse(redis, queue, "new", WORKER) == []
    assert ids(await newer.reclaim(WORKER, 5)) == ["new"]


async def test_a_newer_worker_serves_older_jobs_too(queue: Queue, redis: Redis) -> None:
    newer = sibling(queue, redis, wire_version=2)
    await submit(queue, make_job("old"))

    assert ids(await newer.claim(WORKER, 5)) == ["old"]


async def test_concurrent_claims_share_out_every_job_once(queue: Queue) -> None:
    """taskiq-redis#123: a race between check and lock gave one task to two claimers."""
    await submit(queue, *(make_job(f"j{i}") for i in range(60)))

    batches = await asyncio.gather(*(queue.claim(f"w{i}", 3) for i in range(20)))

    assert sorted(i for batch in batches for i in ids(batch)) == sorted(f"j{i}" for i in range(60))


async def test_concurrent_claims_of_one_worker_are_different_claims(queue: Queue) -> None:
    await submit(queue, *(make_job(f"j{i}") for i in range(6)))

    first, second = await asyncio.gather(queue.claim(WORKER, 3), queue.claim(WORKER, 3))

    assert not set(ids(first)) & set(ids(second))


async def test_a_due_retry_is_promoted_to_the_head(queue: Queue, redis: Redis) -> None:
    await submit_and_claim(queue)
    await reclaim_after_lapse(redis, queue, "a")
    assert await reclaim_after_lapse(redis, queue, "a") == []
    await submit(queue, make_job("b"))

    assert ids(await queue.claim(WORKER, 1)) == ["b"]
    await make_due(redis, queue, "a")
    await submit(queue, make_job("c"))
    (retried,) = await queue.claim(WORKER, 1)

    assert (retried.job_id, retried.attempt, retried.failures) == ("a", 3, 2)


async def test_a_waiting_job_past_its_deadline_is_answered_not_claimed(queue: Queue, redis: Redis) -> None:
    """atlas#482: an expired job must be a distinct error, not a short success."""
    await submit(queue, make_job("late", deadline=100, metadata={"k": "v"}), make_job("fine"))
    await make_late(redis, queue, "late")

    assert ids(await queue.claim(WORKER, 5)) == ["fine"]
    result = await only_result(queue, "late")
    assert (result.status, result.metadata) == (Status.EXPIRED, {"k": "v"})
    assert result.error is not None
    assert result.error.code is ErrorCode.DEADLINE_EXCEEDED


async def test_deadlines_run_by_the_servers_clock(queue: Queue) -> None:
    await submit(queue, make_job("late", deadline=0.001))
    await asyncio.sleep(0.01)

    assert await queue.claim(WORKER, 5) == []
    assert (await only_result(queue, "late")).status is Status.EXPIRED


async def test_deadlines_are_kept_without_any_worker(queue: Queue, redis: Redis) -> None:
    await submit(queue, make_job("a", deadline=100), make_job("b"))
    await make_late(redis, queue, "a")

    assert await queue.expire() == 1
    assert await queue.expire() == 0
    assert (await only_result(queue, "a")).status is Status.EXPIRED


async def test_the_deadline_of_a_running_job_is_its_holders_business(queue: Queue, redis: Redis) -> None:
    claimed = await submit_and_claim(queue, deadline=100)
    await make_late(redis, queue, "a")

    assert await queue.expire() == 0
    assert await queue.finish(WORKER, claimed.attempt, make_result("a")) == "ok"


async def test_a_released_job_past_its_deadline_expires(queue: Queue, redis: Redis) -> None:
    claimed = await submit_and_claim(queue, deadline=100)
    await queue.release(WORKER, [renewal(claimed, 3)])
    await make_late(redis, queue, "a")

    assert await queue.claim(OTHER, 5) == []
    result = await only_result(queue, "a")
    assert (result.status, result.text, result.token_ids) == (Status.EXPIRED, "0 1 2 ", (0, 1, 2))


async def test_an_entry_without_a_job_is_answered_and_removed(queue: Queue, redis: Redis) -> None:
    """opik#8089: a field that cannot be decoded, thrown before the id is known, wedged a queue."""
    await submit(queue, make_job("good"))
    stream = queue.keys.jobs(1, Priority.NORMAL, "default")
    await redis.xadd(stream, {"junk": b"\xff\xfe"})
    await redis.xadd(stream, {"id": b"\xff\x00 not an id"})
    await redis.xadd(stream, {"id": "nobody"})
    await redis.xadd(stream, {"id": "good"})

    assert ids(await queue.claim(WORKER, 10)) == ["good"]

    answers = [result for _, result in await queue.results("default")]
    assert len(answers) == 3
    assert {answer.error.code for answer in answers if answer.error} == {ErrorCode.UNDECODABLE}
    assert "nobody" in {answer.id for answer in answers}
    assert await redis.xlen(stream) == 1


async def test_an_entry_whose_job_is_no_hash_is_answered_and_removed(
    server: object, redis: Redis, queue_name: str
) -> None:
    broken = Queue(redis, queue_name, make_settings())
    await submit(broken, make_job("a"), make_job("good"))
    await redis.delete(broken.keys.job(JobId("a")))
    await redis.set(broken.keys.job(JobId("a")), "garbage")

    assert ids(await broken.claim(WORKER, 10)) == ["good"]
    assert (await only_result(broken, "a", "default")).status is Status.FAILED


async def test_a_job_without_payload_is_answered_under_its_own_reply_name(queue: Queue, redis: Redis) -> None:
    await submit(queue, make_job("a"))
    await redis.hdel(queue.keys.job(JobId("a")), "payload")

    assert await queue.claim(WORKER, 10) == []
    result = await only_result(queue, "a")
    assert result.error is not None
    assert result.error.code is ErrorCode.UNDECODABLE


@pytest.mark.parametrize("deadline", [1e-9, 1e10, 1e300])
async def test_any_deadline_can_be_asked_for(queue: Queue, redis: Redis, deadline: float) -> None:
    await submit(queue, make_job("a", deadline=deadline))

    view = await queue.status(JobId("a"))
    assert view is not None
    assert view.deadline_ms is not None
    assert view.deadline_ms > view.submitted_ms
    assert len(await queue.claim(WORKER, 1)) <= 1


async def test_a_lost_group_is_made_again_from_the_beginning(queue: Queue, redis: Redis) -> None:
    """dapr/components-contrib#3219, faststream#2611: a lost group became a hot loop of NOGROUP."""
    await submit(queue, make_job("held"), make_job("waiting"))
    (held,) = await queue.claim(WORKER, 1)
    await redis.xgroup_destroy(queue.keys.jobs(1, Priority.NORMAL, "default"), "workers")

    assert ids(await queue.claim(OTHER, 5)) == ["waiting"]
    assert await queue.finish(WORKER, held.attempt, make_result("held")) == "ok"


async def test_a_key_of_a_wrong_type_in_one_lane_does_not_stop_the_others(
    server: object, redis: Redis, queue_name: str
) -> None:
    broken = Queue(redis, queue_name, make_settings())
    await submit(broken, make_job("a", tenant="broken"), make_job("b"))
    await redis.set(broken.keys.jobs(1, Priority.NORMAL, "broken"), "garbage")

    assert ids(await broken.claim(WORKER, 5)) == ["b"]
    assert (await broken.depth()).running == 1


async def test_the_doorbell_rings_for_what_came_since_the_last_wait(queue: Queue) -> None:
    await submit(queue, make_job("a"))
    loop = asyncio.get_running_loop()

    began = loop.time()
    await queue.wait(2)
    assert loop.time() - began < 1

    waiter = asyncio.create_task(queue.wait(2))
    await asyncio.sleep(0.05)
    assert not waiter.done()
    assert await queue.submit([make_job("b")], reply_to=REPLY) == [Submitted.CREATED]
    await asyncio.wait_for(waiter, 1)


async def test_waiting_ends_without_a_ring(queue: Queue) -> None:
    await asyncio.wait_for(queue.wait(0.05), 1)


async def test_a_cancelled_wait_leaves_the_queue_usable(queue: Queue) -> None:
    """redis-py#2624, #2665: a cancelled command gave its reply to the next caller."""
    for _ in range(5):
        waiter = asyncio.create_task(queue.wait(2))
        await asyncio.sleep(0.01)
        waiter.cancel()
    await submit(queue, make_job("a"))

    assert ids(await queue.claim(WORKER, 1)) == ["a"]
    await asyncio.wait_for(queue.wait(2), 1)


async def test_limits_of_a_claim_hold_for_the_batch(queue: Queue) -> None:
    await submit(queue, *(make_job(f"j{i}") for i in range(300)))

    assert len(await queue.claim(WORKER, 256)) == 256
    assert len(await queue.claim(WORKER, 256)) == 44


async def test_an_entry_without_a_job_is_refused_after_the_last_job_too(queue: Queue, redis: Redis) -> None:
    """It is counted nowhere: the end of the lane's last job must not hide it."""
    claimed = await submit_and_claim(queue, "good")
    await redis.xadd(queue.keys.jobs(1, Priority.NORMAL, "default"), {"id": "nobody"})
    await queue.finish(WORKER, claimed.attempt, make_result("good"))
    assert await queue.claim(WORKER, 1) == []
    [(_, refused)] = await queue.results("default")
    assert (refused.id, refused.status) == ("nobody", Status.FAILED)
    assert (await queue.depth()).total == 0
