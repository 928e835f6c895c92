"""Leases: who holds a job, who has lost it, and what is kept of the work."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    REPLY,
    WORKER,
    lapse,
    make_deltas,
    make_job,
    make_result,
    only_result,
    reclaim_after_lapse,
    renewal,
    sibling,
    submit,
    submit_and_claim,
)
from tidemill.jobs import Delta, JobId, Priority, Status
from tidemill.moves import FinishOutcome, JobState, Renewal, RenewOutcome
from tidemill.queue import Queue

NOTHING = RenewOutcome()


# finish


async def test_a_result_is_recorded_once_and_its_repeat_says_so(queue: Queue) -> None:
    """Without the holder's token a repeat after a lost reply was told that it had lost."""
    claimed = await submit_and_claim(queue)
    result = make_result("a", worker=WORKER, attempts=1)

    assert await queue.finish(WORKER, claimed.attempt, result) is FinishOutcome.OK
    for _ in range(3):
        assert await queue.finish(WORKER, claimed.attempt, result) is FinishOutcome.ALREADY

    assert await only_result(queue, "a") == result
    assert await queue.result(JobId("a")) == result


async def test_a_finished_job_keeps_what_identifies_it_and_frees_the_rest(queue: Queue, redis: Redis) -> None:
    claimed = await submit_and_claim(queue)
    await queue.renew(WORKER, [renewal(claimed, 2)])
    await queue.finish(WORKER, claimed.attempt, make_result("a"))

    view = await queue.status(claimed.job_id)
    assert view is not None
    assert (view.state, view.status, view.worker) == (JobState.DONE, Status.SUCCEEDED, WORKER)
    assert view.finished_ms is not None
    assert view.replies[REPLY] is not None
    assert await redis.exists(queue.keys.deltas(claimed.job_id)) == 0
    assert await redis.exists(queue.keys.jobs(1, Priority.NORMAL, "default")) == 0
    assert 0 < await redis.ttl(queue.keys.job(claimed.job_id)) <= queue.settings.result_ttl


@pytest.mark.parametrize(("worker", "attempt"), [(OTHER, 1), (WORKER, 2), (WORKER, 0), (OTHER, 2)], ids=str)
async def test_who_does_not_hold_a_job_writes_nothing(queue: Queue, worker: str, attempt: int) -> None:
    await submit_and_claim(queue)

    assert await queue.finish(worker, attempt, make_result("a")) is FinishOutcome.LOST
    assert await queue.results(REPLY) == []
    assert await queue.finish(WORKER, 1, make_result("a")) is FinishOutcome.OK
    assert await queue.finish(worker, attempt, make_result("a")) is FinishOutcome.LOST


async def test_finishing_what_never_was_is_lost(queue: Queue) -> None:
    assert await queue.finish(WORKER, 1, make_result("ghost")) is FinishOutcome.LOST


async def test_a_waiting_job_cannot_be_finished(queue: Queue) -> None:
    await submit(queue, make_job("a"))

    assert await queue.finish(WORKER, 0, make_result("a")) is FinishOutcome.LOST


async def test_a_zombie_is_told_that_it_lost_and_leaves_no_trace(queue: Queue, redis: Redis) -> None:
    """bull#308, bullmq#3183: both finished. MULTI of XADD, XACK, XDEL let the zombie through."""
    zombie = await submit_and_claim(queue)
    (heir,) = await reclaim_after_lapse(redis, queue, "a")

    assert await queue.renew(WORKER, [renewal(zombie, 4)]) == RenewOutcome(lost=frozenset({zombie.job_id}))
    assert await queue.finish(WORKER, zombie.attempt, make_result("a", "zombie")) is FinishOutcome.LOST
    assert await queue.release(WORKER, [renewal(zombie)]) == {zombie.job_id}
    assert await queue.finish(OTHER, heir.attempt, make_result("a", "heir")) is FinishOutcome.OK
    assert await queue.finish(WORKER, zombie.attempt, make_result("a", "zombie")) is FinishOutcome.LOST

    assert (await only_result(queue, "a")).text == "heir"


async def test_a_worker_that_reclaims_its_own_job_does_not_pass_with_the_old_attempt(
    queue: Queue, redis: Redis
) -> None:
    old = await submit_and_claim(queue)
    (new,) = await reclaim_after_lapse(redis, queue, "a", WORKER)

    assert new.attempt == old.attempt + 1
    assert await queue.finish(WORKER, old.attempt, make_result("a")) is FinishOutcome.LOST
    assert await queue.finish(WORKER, new.attempt, make_result("a")) is FinishOutcome.OK


async def test_a_lapsed_lease_that_nobody_took_still_finishes(queue: Queue, redis: Redis) -> None:
    """celery#5935, celery#5306: the work is done, so doing it again would be the fault."""
    claimed = await submit_and_claim(queue)
    await lapse(redis, queue, "a")

    assert await queue.finish(WORKER, claimed.attempt, make_result("a")) is FinishOutcome.OK
    assert await queue.reclaim(OTHER, 5) == []


async def test_results_in_the_way_of_a_foreign_key_go_to_the_default_stream(
    queue: Queue, redis: Redis
) -> None:
    claimed = await submit_and_claim(queue, reply_to="taken")
    await redis.set(queue.keys.results("taken"), "garbage", ex=60)

    assert await queue.finish(WORKER, claimed.attempt, make_result("a")) is FinishOutcome.OK
    assert await only_result(queue, "a", "default") == make_result("a")


async def test_finishing_in_any_order_keeps_the_depth_exact(queue: Queue) -> None:
    """Redis's own lag is NULL once a newer entry finishes before an older one."""
    await submit(queue, *(make_job(name) for name in "abcde"))
    claimed = {job.job_id: job for job in await queue.claim(WORKER, 3)}
    await queue.finish(WORKER, 1, make_result("c"))
    await queue.cancel(JobId("d"))

    depth = await queue.depth()

    assert (depth.total, depth.waiting, depth.running) == (1, 1, len(claimed) - 1)


# renew


async def test_a_renewal_extends_every_lease_and_reports_the_exceptions(queue: Queue, redis: Redis) -> None:
    await submit(queue, *(make_job(name) for name in "abcd"))
    held = await queue.claim(WORKER, 4)
    await queue.cancel(JobId("b"))
    await reclaim_after_lapse(redis, queue, "c")
    before = await redis.zscore(queue.keys.leases, "a")
    await asyncio.sleep(0.002)

    outcome = await queue.renew(WORKER, [*map(renewal, held), Renewal(JobId("ghost"), 1)])

    assert outcome == RenewOutcome(frozenset({JobId("c"), JobId("ghost")}), frozenset({JobId("b")}))
    assert await redis.zscore(queue.keys.leases, "a") > before


async def test_a_renewed_job_is_never_reclaimed(queue: Queue, redis: Redis) -> None:
    """taskiq-redis#101, celery#5935: a job longer than the timeout was started twice."""
    queue = sibling(queue, redis, lease=0.1)
    claimed = await submit_and_claim(queue)
    for _ in range(10):
        assert await queue.renew(WORKER, [renewal(claimed)]) == NOTHING
        assert await queue.reclaim(OTHER, 5) == []
        await asyncio.sleep(0.02)

    assert await queue.finish(WORKER, claimed.attempt, make_result("a")) is FinishOutcome.OK


async def test_hundreds_of_leases_are_renewed_by_one_call(queue: Queue) -> None:
    await submit(queue, *(make_job(f"j{i}") for i in range(600)))
    held = await queue.claim(WORKER, 600)

    assert await queue.renew(WORKER, [renewal(job, 1) for job in held]) == NOTHING
    assert (await queue.depth()).running == 600


async def test_renewing_nothing_is_nothing(queue: Queue) -> None:
    assert await queue.renew(WORKER, []) == NOTHING


async def test_deltas_become_the_checkpoint_that_the_next_attempt_begins_with(
    queue: Queue, redis: Redis
) -> None:
    claimed = await submit_and_claim(queue)
    await queue.renew(WORKER, [renewal(claimed, 2, 3)])
    await queue.renew(WORKER, [renewal(claimed, 1, start=5)])

    (resumed,) = await reclaim_after_lapse(redis, queue, "a")

    assert resumed.checkpoint == make_deltas(2, 3, 1)
    assert (resumed.attempt, resumed.failures) == (2, 0)


async def test_deltas_repeated_after_a_lost_reply_are_stored_once(queue: Queue, redis: Redis) -> None:
    claimed = await submit_and_claim(queue)
    for _ in range(2):
        assert await queue.renew(WORKER, [renewal(claimed, 2, 2)]) == NOTHING
    assert await queue.renew(WORKER, [renewal(claimed, 2, 2, 5)]) == NOTHING

    (resumed,) = await reclaim_after_lapse(redis, queue, "a")

    assert resumed.checkpoint == make_deltas(2, 2, 5)


async def test_deltas_that_leave_a_gap_cost_the_job_not_the_text(queue: Queue, redis: Redis) -> None:
    """sglang#39645: the stream went on at an offset that the generation had not reached."""
    claimed = await submit_and_claim(queue)
    await queue.renew(WORKER, [renewal(claimed, 2)])

    outcome = await queue.renew(WORKER, [renewal(claimed, 2, start=3)])

    assert outcome.lost == {claimed.job_id}
    (resumed,) = await reclaim_after_lapse(redis, queue, "a")
    assert resumed.checkpoint == make_deltas(2)


@pytest.mark.parametrize(
    "deltas",
    [
        (Delta(index=0, text="no token"),),
        (Delta(index=0, token_ids=(1,)), Delta(index=2, token_ids=(3,))),
        (Delta(index=0, token_ids=(1, 2)), Delta(index=1, token_ids=(3,))),
    ],
    ids=["without tokens", "gap", "overlap"],
)
def test_a_renewal_of_deltas_out_of_step_cannot_be_made(deltas: tuple[Delta, ...]) -> None:
    with pytest.raises(ValueError, match="job a"):
        Renewal(JobId("a"), 1, deltas)


# release


async def test_a_released_job_goes_back_to_the_head_and_lost_nothing(queue: Queue) -> None:
    await submit(queue, make_job("a"), make_job("b"))
    (claimed,) = await queue.claim(WORKER, 1)

    assert await queue.release(WORKER, [renewal(claimed, 3)]) == frozenset()
    first, second = await queue.claim(OTHER, 2)

    assert (first.job_id, second.job_id) == ("a", "b")
    assert (first.failures, first.checkpoint) == (0, make_deltas(3))


async def test_released_jobs_count_as_waiting(queue: Queue) -> None:
    """XLEN less pending read 0 after a drain that left released jobs."""
    await submit(queue, make_job("a"), make_job("b"))
    held = await queue.claim(WORKER, 2)
    await queue.release(WORKER, [renewal(job) for job in held])

    depth = await queue.depth()

    assert (depth.total, depth.waiting, depth.running) == (2, 2, 0)
    assert await queue.remove_consumer(WORKER)
    assert len(await queue.claim(OTHER, 5)) == 2


async def test_releasing_never_uses_up_the_attempts(queue: Queue) -> None:
    """arq#267: a shutdown consumed a retry."""
    await submit(queue, make_job("a"))
    for _ in range(2 * queue.settings.max_attempts):
        (claimed,) = await queue.claim(WORKER, 1)
        assert await queue.release(WORKER, [renewal(claimed)]) == frozenset()

    (claimed,) = await queue.claim(WORKER, 1)
    assert claimed.failures == 0


async def test_a_repeated_release_is_no_loss(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)
    for _ in range(2):
        assert await queue.release(WORKER, [renewal(claimed, 2)]) == frozenset()
    (again,) = await queue.claim(OTHER, 5)

    assert await queue.release(WORKER, [renewal(claimed, 2)]) == {claimed.job_id}
    assert await queue.finish(OTHER, again.attempt, make_result("a")) is FinishOutcome.OK


async def test_an_attempt_before_a_release_does_not_pass_after_it(queue: Queue) -> None:
    old = await submit_and_claim(queue)
    await queue.release(WORKER, [renewal(old)])
    (new,) = await queue.claim(WORKER, 1)

    assert await queue.finish(WORKER, old.attempt, make_result("a")) is FinishOutcome.LOST
    assert await queue.finish(WORKER, new.attempt, make_result("a")) is FinishOutcome.OK


async def test_a_cancelled_job_that_is_released_ends(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)
    await queue.cancel(claimed.job_id)
    assert await queue.release(WORKER, [renewal(claimed, 2)]) == frozenset()

    result = await only_result(queue, "a")
    assert (result.status, result.text) == (Status.CANCELLED, "0 1 ")
    assert await queue.claim(OTHER, 1) == []
