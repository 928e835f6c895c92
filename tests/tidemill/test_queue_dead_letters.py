"""Dead letters: jobs that were given up can be looked at, put back and forgotten."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    REPLY,
    WORKER,
    make_job,
    make_suspect,
    reclaim_after_lapse,
    sibling,
    submit,
)
from tidemill.dead_letters import PAGE
from tidemill.errors import InvalidJob, QueueFull
from tidemill.jobs import Job, JobId, Priority, Status
from tidemill.moves import JobState
from tidemill.queue import Queue

A = JobId("a")
LONG_ID = JobId("99999999999999999999999-0")


async def bury(queue: Queue, redis: Redis, job_id: str = A, **fields: object) -> None:
    await submit(queue, make_job(job_id, **fields))
    await make_suspect(redis, queue, job_id)
    (last,) = await queue.claim(WORKER, 1)
    assert await queue.begin(WORKER, last.job_id, last.attempt)
    assert await reclaim_after_lapse(redis, queue, job_id) == []


async def test_a_dead_letter_keeps_the_job_and_how_it_died(queue: Queue, redis: Redis) -> None:
    job = make_job("a", prompt="poison")
    await bury(queue, redis, prompt="poison")

    (letter,) = await queue.dead_letters()

    assert Job.from_wire(letter.payload) == job
    assert (letter.job_id, letter.failures, letter.worker) == (A, 3, WORKER)
    view = await queue.status(A)
    assert view is not None
    assert (view.state, view.status) == (JobState.DONE, Status.FAILED)


async def test_a_dead_letter_is_found_by_its_entry_and_by_its_job(queue: Queue, redis: Redis) -> None:
    for job_id in "abc":
        await bury(queue, redis, job_id)
    letters = await queue.dead_letters()

    for letter in letters:
        assert await queue.dead_letter(letter.entry_id) == letter
        assert await queue.dead_letter(letter.job_id) == letter
    assert await queue.dead_letter("ghost") is None
    assert await queue.dead_letter("1-1") is None


async def test_of_several_letters_of_one_job_the_newest_is_found(queue: Queue, redis: Redis) -> None:
    """An id may be used again once its result has expired. It may also look like the id of an entry, or like
    that of none that Redis could have given."""
    for failures in range(2 * PAGE + 1):
        for job_id in ("7-7", LONG_ID):
            await redis.xadd(queue.keys.dead, {"id": job_id, "payload": "", "failures": failures})
    await redis.expire(queue.keys.dead, 60)

    found = await queue.dead_letter("7-7")

    assert found is not None
    assert (found.job_id, found.failures) == ("7-7", 2 * PAGE)
    found = await queue.dead_letter(LONG_ID)
    assert found is not None
    assert (found.job_id, found.failures) == (LONG_ID, 2 * PAGE)
    assert await queue.dead_letter("ghost") is None


async def test_an_old_letter_is_found_behind_many_newer_ones(queue: Queue, redis: Redis) -> None:
    await bury(queue, redis)
    for _ in range(2 * PAGE):
        await redis.xadd(queue.keys.dead, {"id": "other"})

    found = await queue.dead_letter("a")

    assert found is not None
    assert found.job_id == "a"


async def test_purged_letters_are_gone_and_counted(queue: Queue, redis: Redis) -> None:
    for job_id in "abcd":
        await bury(queue, redis, job_id)
    first, second, *others = await queue.dead_letters()

    assert await queue.purge_dead_letters([]) == 0
    assert await queue.purge_dead_letters([first.entry_id, second.entry_id, "1-1"]) == 2
    assert await queue.purge_dead_letters([first.entry_id]) == 0
    assert await queue.dead_letters() == others
    assert await queue.purge_dead_letters(None) == 2
    assert await queue.purge_dead_letters(None) == 0
    assert (await queue.depth()).dead_letters == 0


async def test_a_purged_letter_keeps_its_answer(queue: Queue, redis: Redis) -> None:
    await bury(queue, redis)
    await queue.purge_dead_letters(None)

    result = await queue.result(A)

    assert result is not None
    assert result.status is Status.FAILED


async def test_what_is_no_entry_is_named_and_nothing_is_purged(queue: Queue, redis: Redis) -> None:
    await bury(queue, redis)
    (letter,) = await queue.dead_letters()

    with pytest.raises(ValueError, match="entry_ids: 'a' is not the id of an entry"):
        await queue.purge_dead_letters([letter.entry_id, "a"])

    assert await queue.dead_letters() == [letter]


async def test_a_dead_letter_can_be_requeued_under_a_new_id_once(queue: Queue, redis: Redis) -> None:
    await bury(queue, redis, metadata={"k": "v"}, priority="low", tenant="t")
    (letter,) = await queue.dead_letters()

    new_id = await queue.requeue(letter, reply_to="again")
    assert await queue.requeue(letter, reply_to="again") == new_id

    (claimed,) = await queue.claim(WORKER, 5)
    job = Job.from_wire(claimed.payload)
    assert claimed.job_id == job.id == new_id != A
    assert job.metadata == {"k": "v", "requeued_from": "a"}
    assert (job.priority, job.tenant, claimed.failures) == (Priority.LOW, "t", 0)
    assert await queue.dead_letters() == []


async def test_a_dead_letter_that_cannot_be_requeued_stays(queue: Queue, redis: Redis) -> None:
    await bury(queue, redis)
    (letter,) = await queue.dead_letters()
    full = sibling(queue, redis, max_depth=1)
    await submit(queue, make_job("b"))

    with pytest.raises(QueueFull):
        await full.requeue(letter, reply_to=REPLY)
    await redis.xadd(queue.keys.dead, {"id": "x", "payload": "garbage", "failures": 1})
    garbage = (await queue.dead_letters())[-1]
    with pytest.raises(InvalidJob):
        await queue.requeue(garbage, reply_to=REPLY)
    assert len(await queue.dead_letters()) == 2
