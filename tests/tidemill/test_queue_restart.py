"""A generation that a worker of another build began is begun anew, never spliced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    WORKER,
    lapse,
    make_deltas,
    make_due,
    make_job,
    make_late,
    make_result,
    only_result,
    reclaim_after_lapse,
    renewal,
    sibling,
    submit,
    timeless,
)
from tidemill.jobs import Delta, JobId, Status, Usage
from tidemill.moves import Claimed, FinishOutcome, Renewal
from tidemill.queue import Queue

A = JobId("a")
ONE, TWO = "build-1", "build-2"


async def begun(queue: Queue, *sizes: int, prompt_tokens: int = 0, **fields: object) -> Claimed:
    """A job that a worker of the first build has generated so many tokens of."""
    await submit(queue, make_job(A, **fields))
    (job,) = await queue.claim(WORKER, 1, fingerprint=ONE)
    await queue.renew(WORKER, [Renewal(A, job.attempt, make_deltas(*sizes), prompt_tokens)])
    return job


async def restarted(queue: Queue, *sizes: int, **fields: object) -> Claimed:
    """The same job in the hands of a worker of the second build."""
    job = await begun(queue, *sizes, **fields)
    await queue.release(WORKER, [renewal(job)])
    (again,) = await queue.claim(OTHER, 1, fingerprint=TWO)
    return again


Next = Callable[[Queue, Redis, Claimed, str], Awaitable[list[Claimed]]]


async def after_release(queue: Queue, redis: Redis, job: Claimed, fingerprint: str) -> list[Claimed]:
    await queue.release(WORKER, [renewal(job)])
    return await queue.claim(OTHER, 5, fingerprint=fingerprint)


async def after_lapse(queue: Queue, redis: Redis, job: Claimed, fingerprint: str) -> list[Claimed]:
    await lapse(redis, queue, A)
    return await queue.reclaim(OTHER, 5, fingerprint=fingerprint)


async def after_backoff(queue: Queue, redis: Redis, job: Claimed, fingerprint: str) -> list[Claimed]:
    await lapse(redis, queue, A)
    await queue.reclaim(WORKER, 5, fingerprint=ONE)
    await redis.hset(queue.keys.job(A), "failures", "1")
    assert await reclaim_after_lapse(redis, queue, A) == []
    await make_due(redis, queue, A)
    return await queue.claim(OTHER, 5, fingerprint=fingerprint)


WAYS = pytest.mark.parametrize("come", [after_release, after_lapse, after_backoff], ids=lambda f: f.__name__)
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["not streamed", "streamed"])


@WAYS
@STREAMED
async def test_a_job_begins_anew_on_a_worker_of_another_build(
    queue: Queue, redis: Redis, come: Next, stream: bool
) -> None:
    """Two builds round differently: the end of one text after the beginning of another is neither."""
    job = await begun(queue, 2, 3, stream=stream)

    (again,) = await come(queue, redis, job, TWO)

    assert (again.job_id, again.checkpoint) == (A, ())
    assert await checkpointed(queue) == 0
    assert not (await queue.renew(OTHER, [renewal(again, 1, 1)])).lost
    await lapse(redis, queue, A)
    (heir,) = await queue.reclaim(WORKER, 5, fingerprint=TWO)
    assert heir.checkpoint == make_deltas(1, 1)


@WAYS
async def test_a_job_goes_on_where_it_was_on_a_worker_of_the_same_build(
    queue: Queue, redis: Redis, come: Next
) -> None:
    job = await begun(queue, 2, 3)

    (again,) = await come(queue, redis, job, ONE)

    assert again.checkpoint == make_deltas(2, 3)
    assert await redis.hexists(queue.keys.job(A), "origin") == 0


async def test_a_worker_that_does_not_say_what_it_is_counts_as_another(queue: Queue, redis: Redis) -> None:
    await begun(queue, 2)

    (again,) = await reclaim_after_lapse(redis, queue, A)

    assert again.checkpoint == ()


async def test_without_a_checkpoint_there_is_nothing_to_drop(queue: Queue, redis: Redis) -> None:
    job = await begun(queue, stream=True)

    await after_release(queue, redis, job, TWO)

    assert await redis.hexists(queue.keys.job(A), "origin") == 0
    assert await redis.exists(queue.keys.deltas(A)) == 0


async def test_the_first_holder_is_fenced_from_the_new_generation(queue: Queue, redis: Redis) -> None:
    job = await begun(queue, 2)
    (again,) = await after_lapse(queue, redis, job, TWO)

    assert (await queue.renew(WORKER, [renewal(job, 2, 1)])).lost == {A}
    assert await queue.release(WORKER, [renewal(job, 2, 1)]) == {A}
    assert await checkpointed(queue) == 0
    assert await queue.finish(OTHER, again.attempt, make_result(A)) is FinishOutcome.OK


@pytest.mark.parametrize("move", ["claim", "reclaim"])
async def test_a_repeat_after_a_lost_reply_drops_nothing_more(queue: Queue, redis: Redis, move: str) -> None:
    twin = sibling(queue, redis)
    twin._series = queue._series
    job = await begun(sibling(queue, redis), 2)
    if move == "claim":
        await queue.release(WORKER, [renewal(job)])
    else:
        await lapse(redis, queue, A)

    lost = await getattr(twin, move)(OTHER, 5, fingerprint=TWO)

    assert timeless(await getattr(queue, move)(OTHER, 5, fingerprint=TWO)) == timeless(lost) != []
    assert await redis.hget(queue.keys.job(A), "origin") == b"2"


async def checkpointed(queue: Queue) -> int:
    view = await queue.status(A)
    assert view is not None
    return view.checkpointed_tokens


# readers


async def read(queue: Queue, cursor: str = "0", *, count: int = 100) -> tuple[list[Delta], str, bool]:
    """All that there is behind the cursor, in pages of `count`."""
    deltas: list[Delta] = []
    while True:
        page = await queue.deltas(A, cursor, count=count)
        deltas += page.deltas
        if page.cursor == cursor or page.ended:
            return deltas, page.cursor, page.ended
        cursor = page.cursor


def void_before(deltas: tuple[Delta, ...]) -> list[Delta]:
    first, *rest = deltas
    return [first.model_copy(update={"restart": True}), *rest]


@pytest.mark.parametrize("count", [1, 2, 100])
async def test_a_reader_is_told_at_the_first_new_piece_that_all_before_is_void(
    queue: Queue, redis: Redis, count: int
) -> None:
    """Also if a page ends between the mark and that piece."""
    job = await begun(queue, 2, 3, stream=True)
    before, cursor, _ = await read(queue, count=count)
    (again,) = await after_release(queue, redis, job, TWO)
    await queue.renew(OTHER, [renewal(again, 1, 1, 2)])
    await queue.finish(OTHER, again.attempt, make_result(A))

    after, _, ended = await read(queue, cursor, count=count)

    assert before == list(make_deltas(2, 3))
    assert after == void_before(make_deltas(1, 1, 2))
    assert ended


async def test_a_reader_who_lags_behind_or_comes_late_reads_the_new_generation_only(
    queue: Queue, redis: Redis
) -> None:
    job = await begun(queue, 2, 3, 4, stream=True)
    first = await queue.deltas(A, count=1)
    (again,) = await after_release(queue, redis, job, TWO)
    await queue.renew(OTHER, [renewal(again, 1, 1)])

    for cursor in (first.cursor, "0"):
        assert (await read(queue, cursor))[0] == void_before(make_deltas(1, 1))


async def test_a_reader_waits_for_the_first_new_piece(queue: Queue) -> None:
    """The mark alone is no piece, and is not given out again and again until there is one."""
    again = await restarted(queue, 2, 3, stream=True)
    page = await queue.deltas(A)
    assert (page.deltas, page.ended) == ((), False)

    reader = asyncio.create_task(queue.deltas(A, page.cursor, block=2.0))
    await asyncio.sleep(0.05)
    assert not reader.done()
    await queue.renew(OTHER, [renewal(again, 1)])

    assert (await asyncio.wait_for(reader, 2)).deltas == tuple(void_before(make_deltas(1)))


async def test_the_numbers_of_the_pieces_rise_over_any_number_of_restarts(queue: Queue, redis: Redis) -> None:
    job = await begun(queue, 1, stream=True)
    cursor, told = "0", []
    for number, fingerprint in enumerate([TWO, ONE, TWO, ONE]):
        found, cursor, _ = await read(queue, cursor)
        told.append(found)
        await queue.release(WORKER, [renewal(job)])
        (job,) = await queue.claim(WORKER, 1, fingerprint=fingerprint)
        await queue.renew(WORKER, [renewal(job, number + 1, 1)])

    assert told == [list(make_deltas(1)), *(void_before(make_deltas(size, 1)) for size in (1, 2, 3))]


async def test_a_job_that_ends_right_after_it_began_anew_ends_for_its_readers(queue: Queue) -> None:
    again = await restarted(queue, 2, 3, stream=True)
    await queue.finish(OTHER, again.attempt, make_result(A))

    assert await read(queue) == ([], "5-2", True)


# attempts


async def failures(queue: Queue) -> int:
    view = await queue.status(A)
    assert view is not None
    return view.failures


async def test_an_attempt_that_began_anew_is_measured_from_its_own_beginning(
    queue: Queue, redis: Redis
) -> None:
    """It gets less far than the one of the other build, and is no failure; then no further, and is one."""
    job = await begun(queue, 9)
    (again,) = await after_lapse(queue, redis, job, TWO)
    assert again.failures == 0
    await queue.renew(OTHER, [renewal(again, 2)])

    (third,) = await after_lapse(queue, redis, again, TWO)
    assert (third.failures, third.checkpoint) == (0, make_deltas(2))
    (fourth,) = await after_lapse(queue, redis, third, TWO)
    assert fourth.failures == 1


async def test_builds_that_void_each_others_progress_do_not_go_on_for_ever(
    queue: Queue, redis: Redis
) -> None:
    """A job that brings down the workers of both always has a progress, and never an answer."""
    job = await begun(queue, 3)
    fingerprints = [TWO, ONE] * 5
    for fingerprint in fingerprints:
        await lapse(redis, queue, A)
        found = await queue.reclaim(OTHER, 5, fingerprint=fingerprint)
        if await redis.zcard(queue.keys.delayed):
            await make_due(redis, queue, A)
            found = await queue.claim(OTHER, 5, fingerprint=fingerprint)
        if not found:
            break
        (job,) = found
        await queue.begin(OTHER, A, job.attempt)
        await queue.renew(OTHER, [renewal(job, 3)])

    assert await failures(queue) == queue.settings.max_attempts
    assert (await only_result(queue, A)).status is Status.FAILED


async def test_a_drained_fleet_of_two_builds_costs_no_attempts(queue: Queue, redis: Redis) -> None:
    """Who hands a job back has not been brought down by it. If that counted, an update that is taken back and
    made again would make suspects of all long jobs, each of which takes up a worker by itself."""
    job = await begun(queue, 3)
    for fingerprint in [TWO, ONE] * 5:
        await queue.release(WORKER, [renewal(job)])
        (job,) = await queue.claim(WORKER, 1, fingerprint=fingerprint)
        await queue.renew(WORKER, [renewal(job, 3)])
        assert not job.alone

    assert await failures(queue) == 0


# what it costs, and what is left of it


async def served(queue: Queue, redis: Redis) -> int:
    return int(await redis.hget(queue.keys.job(A), "served") or 0)


async def test_what_was_charged_stays_charged_and_nothing_is_charged_twice(
    queue: Queue, redis: Redis
) -> None:
    job = await begun(queue, 6, prompt_tokens=10)
    assert await served(queue, redis) == 10 + 2 * 6
    (again,) = await after_release(queue, redis, job, TWO)
    assert await served(queue, redis) == 10 + 2 * 6

    for size, total in ((4, 6), (2, 6), (3, 9)):
        done = await checkpointed(queue)
        deltas = make_deltas(size, start=done)
        await queue.renew(OTHER, [Renewal(A, again.attempt, deltas, 10)])
        assert await served(queue, redis) == 10 + 2 * total
    usage = Usage(prompt_tokens=10, completion_tokens=9)
    await queue.finish(OTHER, again.attempt, make_result(A, usage=usage))
    assert await served(queue, redis) == 10 + 2 * 9


@pytest.mark.parametrize("sizes", [(), (1, 1)], ids=["nothing new", "something new"])
@pytest.mark.parametrize("end", ["cancel", "expire", "bury"])
@STREAMED
async def test_an_answer_without_a_worker_has_the_present_generation_only(
    queue: Queue, redis: Redis, end: str, sizes: tuple[int, ...], stream: bool
) -> None:
    again = await restarted(queue, 2, 3, deadline=1000.0, stream=stream)
    await queue.renew(OTHER, [renewal(again, *sizes)])
    if end == "cancel":
        await lapse(redis, queue, A)
        await queue.cancel(A)
    elif end == "expire":
        await queue.release(OTHER, [renewal(again)])
        await make_late(redis, queue, A)
        await queue.expire()
    else:
        await lapse(redis, queue, A)
        last = sibling(queue, redis, max_attempts=1)
        for heir in await last.reclaim(OTHER, 5, fingerprint=TWO):
            await lapse(redis, queue, heir.job_id)
            assert await last.reclaim(OTHER, 5, fingerprint=TWO) == []

    result = await only_result(queue, A)

    num_tokens = sum(sizes)
    assert result.token_ids == tuple(range(num_tokens))
    assert result.usage.completion_tokens == num_tokens
