"""How jobs end without a worker's result, and that they end once whatever comes together."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    REPLY,
    WORKER,
    lapse,
    make_deltas,
    make_job,
    make_late,
    make_result,
    only_result,
    reclaim_after_lapse,
    renewal,
    sibling,
    submit,
    submit_and_claim,
)
from tidemill.errors import ErrorCode
from tidemill.jobs import JobId, Status
from tidemill.moves import CancelOutcome, Claimed, FinishOutcome
from tidemill.queue import Queue

A = JobId("a")


async def test_cancelling_a_waiting_job_answers_it_at_once(queue: Queue) -> None:
    await submit(queue, make_job("a", metadata={"k": 'ä"\\/'}, model="m"))

    assert await queue.cancel(A) is CancelOutcome.CANCELLED

    result = await only_result(queue, "a")
    assert (result.status, result.metadata, result.model) == (Status.CANCELLED, {"k": 'ä"\\/'}, "m")
    assert result.error is not None
    assert result.error.code is ErrorCode.CANCELLED
    assert await queue.claim(WORKER, 5) == []


async def test_a_repeated_cancellation_says_the_same(queue: Queue) -> None:
    await submit(queue, make_job("a"))

    assert [await queue.cancel(A) for _ in range(3)] == [CancelOutcome.CANCELLED] * 3
    assert (await only_result(queue, "a")).status is Status.CANCELLED


async def test_cancelling_a_delayed_job_answers_it_at_once(queue: Queue, redis: Redis) -> None:
    await submit_and_claim(queue)
    await reclaim_after_lapse(redis, queue, "a")
    await reclaim_after_lapse(redis, queue, "a")

    assert await queue.cancel(A) is CancelOutcome.CANCELLED
    assert (await queue.depth()).delayed == 0


async def test_cancelling_a_running_job_asks_its_holder(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)

    assert await queue.cancel(A) is CancelOutcome.REQUESTED
    assert await queue.results(REPLY) == []
    outcome = await queue.renew(WORKER, [renewal(claimed, 2)])
    assert (outcome.cancelled, outcome.lost) == ({A}, frozenset())
    cancelled = make_result("a", status=Status.CANCELLED)
    assert await queue.finish(WORKER, claimed.attempt, cancelled) is FinishOutcome.OK
    assert await only_result(queue, "a") == cancelled


async def test_cancelling_a_job_whose_worker_is_gone_answers_with_what_there_was(
    queue: Queue, redis: Redis
) -> None:
    claimed = await submit_and_claim(queue)
    await queue.renew(WORKER, [renewal(claimed, 2, 1)])
    await lapse(redis, queue, "a")

    assert await queue.cancel(A) is CancelOutcome.CANCELLED

    result = await only_result(queue, "a")
    assert (result.text, result.token_ids, result.usage.completion_tokens) == ("0 1 2 ", (0, 1, 2), 3)
    assert (result.attempts, result.worker) == (1, WORKER)
    assert await queue.finish(WORKER, claimed.attempt, make_result("a")) is FinishOutcome.LOST


async def test_a_result_that_came_first_stands(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)
    await queue.finish(WORKER, claimed.attempt, make_result("a"))

    assert await queue.cancel(A) is CancelOutcome.FINISHED
    assert await only_result(queue, "a") == make_result("a")


async def test_cancelling_what_never_was_is_unknown(queue: Queue) -> None:
    assert await queue.cancel(JobId("ghost")) is CancelOutcome.UNKNOWN
    assert await queue.status(JobId("ghost")) is None
    assert await queue.result(JobId("ghost")) is None


async def test_a_payload_that_is_no_json_can_be_cancelled_too(queue: Queue, redis: Redis) -> None:
    await submit(queue, make_job("a"))
    await redis.hset(queue.keys.job(A), "payload", b"\xff{")

    assert await queue.cancel(A) is CancelOutcome.CANCELLED
    assert (await only_result(queue, "a")).metadata == {}


STEPS = ("cancel", "finish", "lapse", "reclaim", "heir finishes", "release", "renew", "late", "claim")


class Story:
    """One job, two workers, and steps that may come in any order."""

    def __init__(self, queue: Queue, redis: Redis, first: Claimed) -> None:
        self.queue = queue
        self.redis = redis
        self.first = first
        self.heirs: list[Claimed] = []
        self.winners: list[str] = []

    def steps(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return dict(
            zip(
                STEPS,
                (
                    self.cancel, self.finish, self.lapse, self.reclaim, self.heir_finishes, self.release,
                    self.renew, self.late, self.claim,
                ),
                strict=True,
            )
        )  # fmt: skip

    async def cancel(self) -> None:
        if await self.queue.cancel(A) is CancelOutcome.CANCELLED:
            self.winners.append("cancelled")

    async def finish(self) -> None:
        outcome = await self.queue.finish(WORKER, self.first.attempt, make_result("a", "first"))
        if outcome is FinishOutcome.OK:
            self.winners.append("first")

    async def lapse(self) -> None:
        await self.redis.zadd(self.queue.keys.leases, {"a": 1}, xx=True)

    async def reclaim(self) -> None:
        self.heirs += await self.queue.reclaim(OTHER, 5)

    async def claim(self) -> None:
        self.heirs += await self.queue.claim(OTHER, 5)

    async def heir_finishes(self) -> None:
        for heir in self.heirs:
            outcome = await self.queue.finish(OTHER, heir.attempt, make_result("a", "heir"))
            if outcome is FinishOutcome.OK:
                self.winners.append("heir")

    async def release(self) -> None:
        await self.queue.release(WORKER, [renewal(self.first, 2)])

    async def renew(self) -> None:
        await self.queue.renew(WORKER, [renewal(self.first, 1)])

    async def late(self) -> None:
        await make_late(self.redis, self.queue, "a")

    async def bring_to_an_end(self) -> None:
        for _ in range(5):
            await self.claim()
            await self.lapse()
            await self.reclaim()
            await self.heir_finishes()


async def tell(queue: Queue, redis: Redis, order: tuple[str, ...]) -> tuple[Story, str]:
    queue = sibling(queue, redis, backoff=0.001)
    for key in await redis.keys(f"{queue.keys.prefix}*"):
        await redis.delete(key)
    story = Story(queue, redis, await submit_and_claim(queue, deadline=1000))
    steps = story.steps()
    for step in order:
        await steps[step]()
    await story.bring_to_an_end()
    result = await only_result(queue, "a")
    return story, result.text or result.status.value


@pytest.mark.parametrize("leading", ["cancel", "finish", "lapse", "reclaim"])
async def test_cancel_finish_and_reclaim_in_every_order_give_one_result(
    queue: Queue, redis: Redis, leading: str
) -> None:
    others = [step for step in ("cancel", "finish", "lapse", "reclaim", "heir finishes") if step != leading]
    for rest in itertools.permutations(others):
        order = (leading, *rest)
        story, answer = await tell(queue, redis, order)
        assert len(story.winners) <= 1, order
        assert story.winners in ([], [answer]), order
        if leading == "finish":
            assert answer == "first", order


@pytest.mark.parametrize("pair", [("release", "claim"), ("late", "renew"), ("release", "late")], ids=" ".join)
async def test_release_deadline_and_renewal_among_them_give_one_result_too(
    queue: Queue, redis: Redis, pair: tuple[str, str]
) -> None:
    for order in itertools.permutations((*pair, "cancel", "finish", "lapse", "reclaim"), 3):
        story, answer = await tell(queue, redis, order)
        assert len(story.winners) <= 1, order
        assert not story.winners or answer == story.winners[0] or "cancelled" in story.winners, order


async def test_what_a_buried_job_generated_is_in_its_result(queue: Queue, redis: Redis) -> None:
    queue = sibling(queue, redis, max_attempts=1)
    claimed = await submit_and_claim(queue)
    await queue.renew(WORKER, [renewal(claimed, 2)])
    await reclaim_after_lapse(redis, queue, "a")
    assert await reclaim_after_lapse(redis, queue, "a") == []

    result = await only_result(queue, "a")
    assert (result.status, result.token_ids) == (Status.FAILED, (0, 1))


async def test_a_resumed_job_continues_the_checkpoint_of_every_attempt(queue: Queue, redis: Redis) -> None:
    claimed = await submit_and_claim(queue)
    await queue.renew(WORKER, [renewal(claimed, 2)])
    await queue.release(WORKER, [renewal(claimed, 2, 1)])
    (second,) = await queue.claim(OTHER, 1)
    await queue.renew(OTHER, [renewal(second, 2, start=3)])
    (third,) = await reclaim_after_lapse(redis, queue, "a", WORKER)

    assert third.checkpoint == make_deltas(2, 1, 2)
