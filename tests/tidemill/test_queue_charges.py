"""A tenant is charged exactly what its jobs got, whatever became of them and however often it was tried.

That no promise is left behind, and that every tenant stands in line where its account says, is part of
the audit after each test.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    REPLY,
    WORKER,
    lapse,
    make_job,
    make_late,
    make_result,
    make_settings,
    reclaim_after_lapse,
    renewal,
    sibling,
    submit,
    submit_and_claim,
)
from tidemill.jobs import JobId, Priority, Status, Timings, Usage
from tidemill.keys import lane
from tidemill.moves import CancelOutcome, Claimed, FinishOutcome, Renewal
from tidemill.queue import Queue

A = JobId("a")
PROMPT = 10
NORMAL = lane(1, Priority.NORMAL, "default")


@pytest.fixture
async def claimed(queue: Queue) -> Claimed:
    """A running job, and another tenant's, which keeps the accounts open when the first has ended."""
    held = await submit_and_claim(queue, A)
    await submit(queue, make_job("bystander", tenant="bystander", priority="low"))
    return held


def report(job: Claimed, *sizes: int, start: int = 0) -> Renewal:
    """A renewal of a worker that knows the prompt by now."""
    return replace(renewal(job, *sizes, start=start), prompt_tokens=PROMPT)


def usage(completion_tokens: int) -> Usage:
    return Usage(prompt_tokens=PROMPT, completion_tokens=completion_tokens)


async def charged(redis: Redis, queue: Queue) -> float:
    """What tenant `default` was charged, on its account; its one job must say the same."""
    account = await redis.hget(queue.keys.accounts, NORMAL)
    job = await redis.hget(queue.keys.job(A), "served")
    served = float(account.split()[0])
    assert float(job or 0) == served
    return served


async def test_nothing_is_charged_for_being_claimed(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    assert await charged(redis, queue) == 0


async def test_each_checkpoint_is_charged_once(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    for _ in range(3):
        await queue.renew(WORKER, [report(claimed, 4, 3)])
        assert await charged(redis, queue) == PROMPT + 2 * 7
    await queue.renew(WORKER, [report(claimed, 4, 3, 1)])
    await queue.renew(WORKER, [report(claimed)])
    assert await charged(redis, queue) == PROMPT + 2 * 8


async def test_a_prompt_of_which_nothing_came_is_not_charged(
    queue: Queue, redis: Redis, claimed: Claimed
) -> None:
    await queue.renew(WORKER, [report(claimed)])
    assert await charged(redis, queue) == 0


async def test_a_prompt_that_is_known_late_is_charged_late(
    queue: Queue, redis: Redis, claimed: Claimed
) -> None:
    await queue.renew(WORKER, [renewal(claimed, 2)])
    assert await charged(redis, queue) == 2 * 2
    await queue.renew(WORKER, [report(claimed)])
    assert await charged(redis, queue) == PROMPT + 2 * 2


async def test_a_result_is_charged_once_by_its_usage(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    await queue.renew(WORKER, [report(claimed, 4)])
    for outcome in (FinishOutcome.OK, FinishOutcome.ALREADY, FinishOutcome.ALREADY):
        result = make_result(A, usage=usage(9))
        assert await queue.finish(WORKER, claimed.attempt, result) is outcome
        assert await charged(redis, queue) == PROMPT + 2 * 9


async def test_tokens_from_the_cache_cost_what_computed_ones_do(
    queue: Queue, redis: Redis, claimed: Claimed
) -> None:
    """Or the same answer would cost more on one worker than on another, and more at its first attempt."""
    cached = Usage(prompt_tokens=PROMPT, completion_tokens=1, cached_tokens=8)
    await queue.finish(WORKER, claimed.attempt, make_result(A, usage=cached))
    assert await charged(redis, queue) == PROMPT + 2


async def test_every_generation_of_a_job_is_charged_and_its_prompt_once(
    queue: Queue, redis: Redis, claimed: Claimed
) -> None:
    """A job of 64 generations is no cheaper than 64 jobs, but for their prompts."""
    await queue.finish(WORKER, claimed.attempt, make_result(A, usage=usage(64 * 5)))
    assert await charged(redis, queue) == PROMPT + 2 * 64 * 5


@pytest.mark.parametrize(
    ("status", "tokens", "charge"),
    [
        (Status.SUCCEEDED, 0, PROMPT),
        (Status.FAILED, 0, 1),
        (Status.CANCELLED, 0, 1),
        (Status.EXPIRED, 0, 1),
        (Status.CANCELLED, 3, PROMPT + 6),
        (Status.EXPIRED, 3, PROMPT + 6),
    ],
)
async def test_what_was_cut_short_is_charged_as_far_as_it_came(
    queue: Queue, redis: Redis, claimed: Claimed, status: Status, tokens: int, charge: int
) -> None:
    await queue.finish(WORKER, claimed.attempt, make_result(A, status=status, usage=usage(tokens)))
    assert await charged(redis, queue) == charge


@pytest.mark.parametrize("status", [Status.CANCELLED, Status.EXPIRED, Status.FAILED])
async def test_a_prompt_that_was_begun_is_charged_though_no_token_came(
    queue: Queue, redis: Redis, claimed: Claimed, status: Status
) -> None:
    result = make_result(A, status=status, usage=usage(0), timings=Timings(waiting=0.5))
    await queue.finish(WORKER, claimed.attempt, result)
    assert await charged(redis, queue) == PROMPT


async def test_a_release_keeps_what_was_served(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    for _ in range(2):
        await queue.release(WORKER, [report(claimed, 4)])
        assert await charged(redis, queue) == PROMPT + 2 * 4


async def test_a_release_of_what_had_not_begun_is_free(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    await queue.release(WORKER, [report(claimed)])
    assert await charged(redis, queue) == 0


async def test_the_next_attempt_is_charged_for_what_it_adds(
    queue: Queue, redis: Redis, claimed: Claimed
) -> None:
    """It computes the prompt and the checkpoint again, through no fault of the tenant."""
    await queue.renew(WORKER, [report(claimed, 4)])
    (second,) = await reclaim_after_lapse(redis, queue, A)
    await queue.renew(OTHER, [report(second)])
    assert await charged(redis, queue) == PROMPT + 2 * 4
    await queue.release(OTHER, [report(second, 2, start=4)])
    (third,) = await queue.claim(WORKER, 1)
    assert await charged(redis, queue) == PROMPT + 2 * 6
    await queue.finish(WORKER, third.attempt, make_result(A, usage=usage(7)))
    assert await charged(redis, queue) == PROMPT + 2 * 7


async def test_a_holder_that_was_too_late_charges_nothing(
    queue: Queue, redis: Redis, claimed: Claimed
) -> None:
    await reclaim_after_lapse(redis, queue, A)
    await queue.renew(WORKER, [report(claimed, 4)])
    await queue.finish(WORKER, claimed.attempt, make_result(A, usage=usage(9)))
    await queue.release(WORKER, [report(claimed, 4)])
    assert await charged(redis, queue) == 0


async def test_a_buried_job_costs_what_it_got(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    await queue.renew(WORKER, [report(claimed, 4)])
    impatient = sibling(queue, redis, max_attempts=1)
    await reclaim_after_lapse(redis, impatient, A)
    assert await reclaim_after_lapse(redis, impatient, A, WORKER) == []
    assert await charged(redis, queue) == PROMPT + 2 * 4


async def test_a_delayed_job_is_promised_nothing(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    await reclaim_after_lapse(redis, queue, A)
    assert await reclaim_after_lapse(redis, queue, A, WORKER) == []
    assert await charged(redis, queue) == 0


async def test_a_cancelled_or_expired_job_costs_what_it_got(
    queue: Queue, redis: Redis, claimed: Claimed
) -> None:
    await queue.renew(WORKER, [report(claimed, 4)])
    await lapse(redis, queue, A)
    assert await queue.cancel(A) is CancelOutcome.CANCELLED
    assert await charged(redis, queue) == PROMPT + 2 * 4


async def test_a_job_that_expires_between_attempts_costs_what_it_got(queue: Queue, redis: Redis) -> None:
    held = await submit_and_claim(queue, A, deadline=100.0)
    await submit(queue, make_job("bystander", tenant="bystander"))
    await queue.release(WORKER, [report(held, 4)])
    await make_late(redis, queue, A)
    assert await queue.expire() == 1
    assert await charged(redis, queue) == PROMPT + 2 * 4


async def test_a_repeated_claim_promises_once(queue: Queue, redis: Redis) -> None:
    """The audit counts promises against the jobs that have them."""
    await submit(queue, make_job(A), make_job("b"))
    twin = sibling(queue, redis)
    twin._series = queue._series
    for one in (twin, queue):
        assert {held.job_id for held in await one.claim(WORKER, 2)} == {"a", "b"}
    assert await charged(redis, queue) == 0


async def test_a_job_is_promised_what_jobs_cost_on_average(
    queue: Queue, redis: Redis, claimed: Claimed
) -> None:
    """At first nobody knows; then what is seen is followed."""
    assert await redis.hget(queue.keys.job(A), "promised") == b"1"
    await queue.finish(WORKER, claimed.attempt, make_result(A, usage=usage(100)))

    held = await submit_and_claim(queue, "second")
    assert await redis.hget(queue.keys.job(held.job_id), "promised") == b"210"
    for number in range(200):
        await queue.finish(WORKER, held.attempt, make_result(held.job_id, usage=usage(5)))
        held = await submit_and_claim(queue, f"job-{number}")

    assert 20 <= int(await redis.hget(queue.keys.job(held.job_id), "promised") or 0) <= 30


async def test_what_exceeds_the_promise_counts_at_once(queue: Queue) -> None:
    """A job that is long beyond expectation must not wait for its end to be seen as such."""
    await submit(queue, *(make_job(f"long-{i}", tenant="long") for i in range(5)))
    await submit(queue, *(make_job(f"other-{i}", tenant="other") for i in range(5)))
    first = await queue.claim(WORKER, 2)
    (long,) = (job for job in first if job.job_id.startswith("long"))

    await queue.renew(WORKER, [report(long, 50)])

    assert {job.job_id[:5] for job in await queue.claim(WORKER, 4)} == {"other"}


async def test_a_new_weight_holds_from_then_on(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    await queue.renew(WORKER, [report(claimed, 5)])
    await queue.set_weight("default", 4)
    await queue.renew(WORKER, [report(claimed, 5, 8)])

    account = await redis.hget(queue.keys.accounts, NORMAL)
    assert float(account.split()[0]) == PROMPT + 2 * 5 + 2 * 8 / 4


async def test_what_was_promised_to_a_job_that_was_evicted_is_taken_back(
    queue: Queue, redis: Redis, claimed: Claimed
) -> None:
    await redis.delete(queue.keys.job(A))

    assert await reclaim_after_lapse(redis, queue, A) == []

    assert await redis.hget(queue.keys.accounts, NORMAL) == b"0 0"


async def test_accounts_are_closed_when_nobody_has_jobs(queue: Queue, redis: Redis) -> None:
    for tenant in ("x", "y"):
        await submit(queue, make_job(tenant, tenant=tenant))
    for held in await queue.claim(WORKER, 2):
        assert await redis.exists(queue.keys.accounts) == 1
        await queue.finish(WORKER, held.attempt, make_result(held.job_id, usage=usage(3)))

    assert await redis.exists(queue.keys.accounts, queue.keys.resting) == 0


async def test_tenants_that_have_gone_for_good_are_forgotten(queue: Queue, redis: Redis) -> None:
    """Else a busy queue would remember everybody who ever came by."""
    await submit(queue, make_job("stays", tenant="stays", priority="low"))
    for number in range(5):
        held = await submit_and_claim(queue, f"job-{number}", tenant=f"guest-{number}")
        await queue.finish(WORKER, held.attempt, make_result(held.job_id, usage=usage(3)))
    assert await redis.hlen(queue.keys.accounts) == 1 + 5 + 1

    long_ago = {lane(1, Priority.NORMAL, f"guest-{number}"): 1 for number in range(5)}
    await redis.zadd(queue.keys.resting, long_ago, xx=True)
    for number in range(3):
        held = await submit_and_claim(queue, f"new-{number}", tenant=f"new-{number}")
        await queue.finish(WORKER, held.attempt, make_result(held.job_id, usage=usage(3)))

    assert await redis.hlen(queue.keys.accounts) == 1 + 3 + 1


@pytest.mark.parametrize("field", ["served", "promised"])
@pytest.mark.parametrize("value", ["nan", "inf", "-5", "1e400", "much", ""])
async def test_a_foreign_hand_cannot_make_an_account_infinite(
    server: object, redis: Redis, queue_name: str, field: str, value: str
) -> None:
    """No audit here: what this job was promised is lost."""
    queue = Queue(redis, queue_name)
    claimed = await submit_and_claim(queue, A)
    await submit(queue, *(make_job(f"more-{i}") for i in range(3)))
    await redis.hset(queue.keys.job(A), field, value)

    await queue.renew(WORKER, [report(claimed, 4)])
    assert await queue.finish(WORKER, claimed.attempt, make_result(A, usage=usage(5))) is FinishOutcome.OK

    account = await redis.hget(queue.keys.accounts, NORMAL)
    assert float(account.split()[0]) == PROMPT + 2 * 5
    assert len(await queue.claim(WORKER, 5)) == 3
    assert len(await queue.results(REPLY)) == 1


@pytest.mark.parametrize("account", ["nan inf", "-1 1e999", "", "one two", "1"])
async def test_a_damaged_account_stops_nobody(
    server: object, redis: Redis, queue_name: str, account: str
) -> None:
    queue = Queue(redis, queue_name)
    await submit(queue, *(make_job(f"job-{i}") for i in range(4)), make_job("other", tenant="other"))
    await redis.hset(queue.keys.accounts, NORMAL, account)

    for _ in range(5):
        (held,) = await queue.claim(WORKER, 1)
        assert await queue.finish(WORKER, held.attempt, make_result(held.job_id, usage=usage(5))) == "ok"


@pytest.mark.parametrize(
    "damage", ["nan 0", "1e400 0", "-1 0", "9007199254740992 0", "", "no accounts", "no load"]
)
async def test_who_was_served_more_stays_behind_though_the_account_is_lost(
    server: object, redis: Redis, queue_name: str, damage: str
) -> None:
    """Given a tenant that was served more than another, when its next token is charged to an account that
    somebody has damaged, then it is still not its turn. No audit here: counts are lost too."""
    queue = Queue(redis, queue_name, make_settings())
    tenants = ("more", "less", "other")
    more, less, other = [await submit_and_claim(queue, name, tenant=name) for name in tenants]
    for tenant in ("more", "less"):
        await submit(queue, *(make_job(f"{tenant}-{number}", tenant=tenant) for number in range(5)))
    await queue.renew(WORKER, [report(more, 50), report(less, 5)])

    if damage.startswith("no "):
        await redis.delete(f"{queue.keys.prefix}{damage.removeprefix('no ')}")
    else:
        await redis.hset(queue.keys.accounts, lane(1, Priority.NORMAL, "more"), damage)
    await queue.finish(WORKER, other.attempt, make_result(other.job_id, usage=usage(3)))
    await queue.renew(WORKER, [report(more, 50, 1), report(less, 5, 1)])

    assert {job.job_id.split("-")[0] for job in await queue.claim(WORKER, 5)} == {"less"}
