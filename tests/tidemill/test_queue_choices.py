"""Generations and logprobs of jobs that no worker is left to answer: the checkpoint is the answer."""

from __future__ import annotations

import json

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    WORKER,
    lapse,
    make_deltas,
    make_job,
    make_late,
    only_result,
    reclaim_after_lapse,
    renewal,
    sibling,
    submit,
    submit_and_claim,
)
from tidemill import wire
from tidemill.jobs import Choice, Delta, FinishReason, JobId, Logprob, Result, Status, TokenLogprobs
from tidemill.moves import Claimed, Renewal
from tidemill.queue import Queue

A = JobId("a")
ODD = 'quote " backslash \\ slash / "logprobs":[ ],"logprobs":[{} ä 🌊'
"""Text that could be taken for JSON."""


def make_logprobs(*token_ids: int) -> tuple[TokenLogprobs, ...]:
    """Numbers that take all the digits of a double, odd texts, and empty arrays."""
    return tuple(
        TokenLogprobs(
            token_id=token_id,
            logprob=-1 / 3 - token_id,
            rank=2,
            token=ODD,
            top=(
                Logprob(
                    token_id=token_id + 1, logprob=-1e-17 / 3, rank=1, token="\ufffd", bytes=(0xF0, 0x9F)
                ),
                Logprob(token_id=token_id, logprob=-1 / 3 - token_id, rank=2, token=ODD, bytes=()),
            ),
        )
        for token_id in token_ids
    )


PIECES = (
    Delta(index=0, text=f"{ODD}1", token_ids=(1, 2), logprobs=make_logprobs(1, 2)),
    Delta(index=2, choice=2, text="third", token_ids=(7,), logprobs=make_logprobs(7)),
    Delta(index=3, text="", token_ids=(3,), logprobs=make_logprobs(3)),
    Delta(index=4, choice=2, text=ODD, token_ids=(8, 9), logprobs=make_logprobs(8, 9)),
)


@pytest.fixture
async def claimed(queue: Queue) -> Claimed:
    """A job of three generations, the second of which has no token yet."""
    held = await submit_and_claim(
        queue, "a", deadline=1000.0, metadata={"k": "v"}, params={"n": 3, "temperature": 1.0, "logprobs": 2}
    )
    outcome = await queue.renew(WORKER, [Renewal(A, held.attempt, PIECES[:2])])
    assert not outcome.lost
    await queue.renew(WORKER, [Renewal(A, held.attempt, PIECES)])
    return held


def assert_answered(result: Result, status: Status, reason: FinishReason) -> None:
    assert (result.status, result.metadata) == (status, {"k": "v"})
    assert result.choices == (
        Choice(
            index=0,
            text=f"{ODD}1",
            token_ids=(1, 2, 3),
            finish_reason=reason,
            logprobs=make_logprobs(1, 2, 3),
        ),
        Choice(index=1, finish_reason=reason),
        Choice(
            index=2,
            text=f"third{ODD}",
            token_ids=(7, 8, 9),
            finish_reason=reason,
            logprobs=make_logprobs(7, 8, 9),
        ),
    )
    assert result.usage.completion_tokens == 6


async def test_the_next_attempt_gets_every_generation(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    (resumed,) = await reclaim_after_lapse(redis, queue, "a")
    assert resumed.checkpoint == PIECES


async def test_a_cancelled_job_keeps_what_each_generation_had(
    queue: Queue, redis: Redis, claimed: Claimed
) -> None:
    await lapse(redis, queue, "a")
    await queue.cancel(A)
    assert_answered(await only_result(queue, "a"), Status.CANCELLED, FinishReason.CANCELLED)


async def test_an_expired_one_too(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    await queue.release(WORKER, [Renewal(A, claimed.attempt)])
    await make_late(redis, queue, "a")
    assert await queue.expire() == 1
    assert_answered(await only_result(queue, "a"), Status.EXPIRED, FinishReason.EXPIRED)


async def test_and_one_that_was_given_up(queue: Queue, redis: Redis, claimed: Claimed) -> None:
    impatient = sibling(queue, redis, max_attempts=1)
    await reclaim_after_lapse(redis, impatient, "a")
    assert await reclaim_after_lapse(redis, impatient, "a") == []
    assert_answered(await only_result(queue, "a"), Status.FAILED, FinishReason.ERROR)


@pytest.mark.parametrize(("params", "n"), [({}, 1), ({"n": 4, "temperature": 0.5}, 4)])
async def test_a_job_that_never_ran_has_as_many_generations_as_it_asked_for(
    queue: Queue, params: dict[str, object], n: int
) -> None:
    await submit(queue, make_job("a", params=params))
    await queue.cancel(A)
    result = await only_result(queue, "a")
    assert result.choices == tuple(Choice(index=i, finish_reason=FinishReason.CANCELLED) for i in range(n))


@pytest.mark.parametrize(
    "payload",
    [b"7", b"\xff", b'{"params":7}', b'{"params":{"n":1e9}}', b'{"params":{"n":-1}}', b"{}"],
    ids=str,
)
async def test_a_damaged_payload_costs_no_answer(
    queue: Queue, redis: Redis, claimed: Claimed, payload: bytes
) -> None:
    await redis.hset(queue.keys.job(A), "payload", payload)
    await lapse(redis, queue, "a")
    await queue.cancel(A)
    result = await only_result(queue, "a")
    assert (result.status, result.finish_reason) == (Status.CANCELLED, FinishReason.CANCELLED)


async def test_a_piece_of_no_generation_of_the_job_costs_no_answer(queue: Queue, redis: Redis) -> None:
    held = await submit_and_claim(queue, "a")
    await queue.renew(WORKER, [renewal(held, 2)])
    await redis.xadd(queue.keys.deltas(A), {"delta": '{"index":2,"choice":5,"token_ids":[1]}'}, "3-0")
    await lapse(redis, queue, "a")
    await queue.cancel(A)
    assert (await only_result(queue, "a")).finish_reason is FinishReason.CANCELLED


def test_logprobs_are_the_last_of_a_piece() -> None:
    """The scripts cut them off there, to pass them on untouched."""
    piece = Delta(index=1, choice=1, text="x", token_ids=(1,), logprobs=make_logprobs(1))
    assert list(json.loads(piece.to_wire()))[-1] == "logprobs"


async def test_a_renewal_of_much_text_is_sent_in_parts(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """With logprobs some jobs send megabytes: no single script may hold up the server for all of it."""
    sizes: list[int] = []
    send = queue._link.run

    async def watch(move: object, calls: list[list[object]]) -> object:
        sizes.extend(len(call) for call in calls)
        return await send(move, calls)  # type: ignore[arg-type]  # a wrapped method

    monkeypatch.setattr(queue._link, "run", watch)
    monkeypatch.setattr(wire, "RENEWED_BYTES_PER_CALL", 200)
    await submit(queue, *(make_job(f"job-{number}") for number in range(6)))
    held = await queue.claim(WORKER, 6)
    wide = Delta(index=0, text="x" * 150, token_ids=(1,))
    sizes.clear()
    outcome = await queue.renew(WORKER, [Renewal(job.job_id, job.attempt, (wide,)) for job in held])
    assert not outcome.lost
    assert sizes == [1 + 2 * 7] * 3
    assert await queue.release(WORKER, [Renewal(job.job_id, job.attempt) for job in held]) == frozenset()
    assert [job.checkpoint for job in await queue.claim(WORKER, 6)] == [(wide,)] * 6


def test_many_renewals_are_sent_in_parts_that_hold_nobody_up() -> None:
    per_call = wire.RENEWALS_PER_CALL
    assert len(wire.renewal_calls(WORKER, [Renewal(A, 1, make_deltas(1))] * per_call)) == 1
    assert len(wire.renewal_calls(WORKER, [Renewal(A, 1)] * (5 * per_call))) == 5
    assert len(wire.renewal_calls(WORKER, [Renewal(A, 1)] * (5 * per_call + 1))) == 6
    assert wire.renewal_calls(WORKER, []) == []
