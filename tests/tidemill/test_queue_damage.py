"""A foreign hand in one job's record or checkpoint: it gets its one answer, and all others go on.

comet-ml/opik#8089: one undecodable field stopped everything behind it for good.
"""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    WORKER,
    lapse,
    make_deltas,
    make_job,
    make_late,
    make_result,
    only_result,
    renewal,
    submit,
    submit_and_claim,
)
from tidemill.errors import ErrorCode
from tidemill.jobs import JobId, Status
from tidemill.moves import CancelOutcome, Claimed, FinishOutcome, Renewal
from tidemill.queue import Queue

BAD = JobId("bad")
DAMAGES = [
    "a string",
    "gone",
    b"\xff{",
    b"7",
    b'{"index":3,"token_ids":[1e999]}',
    b'{"index":3,"text":{},"token_ids":[1]}',
    b'{"index":9,"token_ids":[1]}',
]


@pytest.fixture(params=DAMAGES, ids=str)
async def held(request: pytest.FixtureRequest, queue: Queue, redis: Redis) -> list[Claimed]:
    """Two streamed jobs of one worker; somebody has damaged what the first has generated."""
    bad = await submit_and_claim(queue, BAD, stream=True, deadline=1000.0)
    good = await submit_and_claim(queue, "good")
    await queue.renew(WORKER, [renewal(bad, 2, 1), renewal(good, 2)])
    key = queue.keys.deltas(BAD)
    if isinstance(request.param, bytes):
        await redis.xadd(key, {"delta": request.param}, "10-0")
    else:
        await redis.delete(key)
    if request.param == "a string":
        await redis.set(key, "foreign", ex=60)
    return [bad, good]


async def test_renewals_of_other_jobs_go_on(queue: Queue, redis: Redis, held: list[Claimed]) -> None:
    bad, good = held

    outcome = await queue.renew(WORKER, [renewal(bad, 1, start=3), renewal(good, 1, start=2)])

    assert outcome.lost <= {BAD}
    await queue.finish(WORKER, bad.attempt, make_result(BAD))
    (_, resumed) = (await lapse(redis, queue, "good"), await queue.reclaim(OTHER, 10))
    assert resumed[0].checkpoint == make_deltas(2, 1)


async def test_other_jobs_are_released(queue: Queue, held: list[Claimed]) -> None:
    bad, good = held

    lost = await queue.release(WORKER, [renewal(bad, 1, start=3), renewal(good, 1, start=2)])

    assert lost <= {BAD}
    claimed = await queue.claim(OTHER, 10)
    assert ("good", make_deltas(2, 1)) in [(job.job_id, job.checkpoint) for job in claimed]
    await queue.finish(WORKER, bad.attempt, make_result(BAD))  # unless it is answered already


async def test_the_next_attempt_is_refused_with_an_answer(
    queue: Queue, redis: Redis, held: list[Claimed]
) -> None:
    await lapse(redis, queue, BAD, "good")

    assert [job.job_id for job in await queue.reclaim(OTHER, 10)] == ["good"]

    result = await only_result(queue, BAD)
    assert result.error is not None
    assert result.error.code is ErrorCode.UNDECODABLE
    assert "checkpoint" in result.error.message


async def test_it_can_be_cancelled(queue: Queue, redis: Redis, held: list[Claimed]) -> None:
    await lapse(redis, queue, BAD)

    assert await queue.cancel(BAD) is CancelOutcome.CANCELLED
    assert (await only_result(queue, BAD)).status is Status.CANCELLED


async def test_it_expires(queue: Queue, redis: Redis, held: list[Claimed]) -> None:
    bad, _ = held
    await queue.release(WORKER, [Renewal(bad.job_id, bad.attempt)])
    await make_late(redis, queue, BAD)

    assert await queue.expire() == 1
    assert (await only_result(queue, BAD)).status is Status.EXPIRED


async def test_its_holder_can_finish_it(queue: Queue, held: list[Claimed]) -> None:
    bad, _ = held

    assert await queue.finish(WORKER, bad.attempt, make_result(BAD)) is FinishOutcome.OK
    assert await only_result(queue, BAD) == make_result(BAD)


@pytest.mark.parametrize(
    ("field", "value"), [("seed", "x"), ("submitted", "\xff"), ("deadline", "1e400")], ids=str
)
async def test_a_damaged_record_is_answered_and_harms_no_other(
    queue: Queue, redis: Redis, field: str, value: str
) -> None:
    await submit(queue, make_job("damaged"), make_job("good"))
    await redis.hset(queue.keys.job(JobId("damaged")), field, value)

    assert [job.job_id for job in await queue.claim(WORKER, 5)] == ["good"]
    result = await only_result(queue, "damaged")
    assert result.error is not None
    assert result.error.code is ErrorCode.UNDECODABLE
