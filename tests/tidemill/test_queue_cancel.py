"""The cancellation of a running job is heard of at once, whether it is being renewed or not."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    WORKER,
    lapse,
    make_job,
    make_result,
    reclaim_after_lapse,
    renewal,
    sibling,
    submit,
    submit_and_claim,
)
from tidemill.jobs import JobId, Status
from tidemill.moves import CancelOutcome, FinishOutcome, RenewOutcome
from tidemill.queue import Queue

A, B = JobId("a"), JobId("b")
NOTHING = RenewOutcome()


async def test_a_worker_that_renews_nothing_hears_of_each_cancellation_once(queue: Queue) -> None:
    await submit(queue, *map(make_job, "abc"))
    await queue.claim(WORKER, 3)
    await queue.cancel(A)
    await queue.cancel(B)

    assert await queue.renew(WORKER, []) == RenewOutcome(cancelled=frozenset({A, B}))
    assert await queue.renew(WORKER, []) == NOTHING


async def test_a_renewal_brings_cancellations_of_jobs_that_are_not_among_the_renewed(queue: Queue) -> None:
    await submit(queue, make_job(A), make_job(B))
    first, _ = await queue.claim(WORKER, 2)
    await queue.cancel(B)

    outcome = await queue.renew(WORKER, [renewal(first, 1)])

    assert outcome == RenewOutcome(cancelled=frozenset({B}))


async def test_a_cancellation_whose_reply_was_lost_is_heard_of_at_the_jobs_renewal(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)
    await queue.cancel(A)
    await queue.renew(WORKER, [])

    assert (await queue.renew(WORKER, [renewal(claimed)])).cancelled == {A}
    assert await queue.cancel(A) is CancelOutcome.REQUESTED
    assert (await queue.renew(WORKER, [])).cancelled == {A}


async def test_one_workers_cancellations_are_not_anothers(queue: Queue) -> None:
    await submit_and_claim(queue)
    await queue.cancel(A)

    assert await queue.renew(OTHER, []) == NOTHING
    assert (await queue.renew(WORKER, [])).cancelled == {A}


@pytest.mark.parametrize("how", ["finished", "released", "taken over"])
async def test_nothing_is_heard_of_a_job_that_is_not_the_workers_any_more(
    queue: Queue, redis: Redis, how: str
) -> None:
    claimed = await submit_and_claim(queue)
    await queue.cancel(A)
    if how == "finished":
        await queue.finish(WORKER, claimed.attempt, make_result(A))
    elif how == "released":
        await queue.release(WORKER, [renewal(claimed)])
    else:
        await redis.hdel(queue.keys.job(A), "cancel")
        await reclaim_after_lapse(redis, queue, A)

    assert await queue.renew(WORKER, []) == NOTHING
    assert await redis.exists(queue.keys.cancelled(WORKER)) == 0


async def test_what_is_lost_is_not_told_as_cancelled_too(queue: Queue) -> None:
    """A holder that has parted ways with the checkpoint ends nothing: whoever takes the job over does."""
    claimed = await submit_and_claim(queue)
    await queue.cancel(A)

    gap = renewal(claimed, 2, start=3)
    assert await queue.renew(WORKER, [gap]) == RenewOutcome(lost=frozenset({A}))


async def test_what_nobody_asks_for_expires(queue: Queue, redis: Redis) -> None:
    await submit_and_claim(queue)
    await queue.cancel(A)

    assert 0 < await redis.pttl(queue.keys.cancelled(WORKER)) <= queue.settings.lease * 1000


async def test_a_job_cancelled_before_its_holder_asks_ends_with_what_the_holder_says(
    queue: Queue,
) -> None:
    claimed = await submit_and_claim(queue)
    await queue.cancel(A)
    await queue.renew(WORKER, [])

    cancelled = make_result(A, "so far", status=Status.CANCELLED)
    assert await queue.finish(WORKER, claimed.attempt, cancelled) is FinishOutcome.OK
    assert await queue.result(A) == cancelled


async def test_a_foreign_hand_in_the_way_stops_neither_cancelling_nor_renewing(
    queue: Queue, redis: Redis
) -> None:
    claimed = await submit_and_claim(queue)
    await redis.set(queue.keys.cancelled(WORKER), "foreign", ex=60)

    assert await queue.cancel(A) is CancelOutcome.REQUESTED
    assert await queue.renew(WORKER, []) == NOTHING
    assert (await queue.renew(WORKER, [renewal(claimed)])).cancelled == {A}


async def test_asking_extends_no_lease(queue: Queue, redis: Redis) -> None:
    await submit_and_claim(queue)
    await lapse(redis, queue, A)

    await queue.renew(WORKER, [])

    assert [job.job_id for job in await queue.reclaim(OTHER, 5)] == [A]


async def test_releasing_nothing_asks_nothing(queue: Queue, redis: Redis) -> None:
    await submit_and_claim(queue)
    await queue.cancel(A)

    assert await queue.release(WORKER, []) == frozenset()
    assert (await sibling(queue, redis).renew(WORKER, [])).cancelled == {A}
