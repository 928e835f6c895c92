"""Waiting for answers, against a source that the test controls."""

from __future__ import annotations

import asyncio

import pytest

from tests.tidemill.scripted_source import ScriptedSource, make_inbox
from tidemill.errors import ErrorCode, InvalidJob, JobUnknown, QueueUnavailable
from tidemill.inbox import Answer, Inbox, Watch
from tidemill.jobs import JobId
from tidemill.patience import Patience


def waiting(inbox: Inbox, job_id: str) -> asyncio.Future[Answer]:
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def deliver(_: Watch, value: Answer) -> None:
        answer.set_result(value)

    inbox.watch(JobId(job_id), deliver)
    return answer


async def until(source: ScriptedSource, call: str, times: int) -> None:
    async with asyncio.timeout(5):
        while source.calls.count(call) < times:
            await asyncio.sleep(0.001)


async def test_an_answer_reaches_everyone_who_waits_for_it() -> None:
    source = ScriptedSource()
    source.hashes = {"a": None, "b": None}
    async with make_inbox(source) as inbox:
        first, second, other = waiting(inbox, "a"), waiting(inbox, "a"), waiting(inbox, "b")
        await until(source, "look", 1)
        recorded = source.answer("a")
        assert await first == await second == recorded
        assert not other.done()


async def test_a_result_of_somebody_elses_job_is_ignored() -> None:
    source = ScriptedSource()
    source.hashes = {"mine": None}
    async with make_inbox(source) as inbox:
        mine = waiting(inbox, "mine")
        await until(source, "read", 1)
        source.answer("not-mine")
        recorded = source.answer("mine")
        assert await mine == recorded


async def test_an_answer_on_another_stream_is_found_through_the_hash() -> None:
    source = ScriptedSource()
    source.hashes = {"a": None}
    async with make_inbox(source) as inbox:
        answer = waiting(inbox, "a")
        await until(source, "look", 1)
        recorded = source.answer("a", stream=False)
        assert await answer == recorded


async def test_the_reading_position_is_taken_before_the_first_look() -> None:
    """Else an answer recorded between the two would be seen by neither."""
    source = ScriptedSource()
    source.answer("a")
    async with make_inbox(source) as inbox:
        await waiting(inbox, "a")
        assert source.calls.index("tail") < source.calls.index("look")


async def test_a_job_that_vanishes_is_noticed() -> None:
    source = ScriptedSource()
    source.hashes = {"a": None}
    async with make_inbox(source) as inbox:
        answer = waiting(inbox, "a")
        await until(source, "look", 2)
        source.hashes.clear()
        assert isinstance(await answer, JobUnknown)


async def test_every_one_of_many_is_looked_at_again() -> None:
    """Given more unfinished jobs than one look takes, all of them are found in time."""
    source = ScriptedSource()
    names = [f"job-{n}" for n in range(300)]
    source.hashes = dict.fromkeys(names)
    async with make_inbox(source) as inbox:
        answers = [waiting(inbox, name) for name in names]
        await until(source, "look", 6)
        for name in names:
            source.answer(name, stream=False)
        async with asyncio.timeout(5):
            assert await asyncio.gather(*answers) == [source.hashes[name] for name in names]


async def test_an_absence_of_redis_is_ridden_out() -> None:
    source = ScriptedSource()
    source.hashes = {"a": None}
    async with make_inbox(source) as inbox:
        answer = waiting(inbox, "a")
        await until(source, "read", 1)
        source.failure = QueueUnavailable("away")
        await until(source, "read", 3)
        source.failure = None
        recorded = source.answer("a")
        assert await answer == recorded


async def test_an_absence_beyond_patience_is_told() -> None:
    source = ScriptedSource()
    source.hashes = {"a": None}
    async with make_inbox(source, patience=0.05) as inbox:
        answer = waiting(inbox, "a")
        await until(source, "read", 1)
        source.failure = QueueUnavailable("away")
        assert await answer is source.failure


async def test_a_fault_in_the_stream_is_told_to_everyone() -> None:
    source = ScriptedSource()
    source.failure = InvalidJob("undecodable", code=ErrorCode.UNDECODABLE)
    async with make_inbox(source) as inbox:
        answers = await asyncio.gather(waiting(inbox, "a"), waiting(inbox, "b"))
        assert list(answers) == [source.failure, source.failure]


async def test_after_a_failure_the_next_wait_starts_afresh() -> None:
    source = ScriptedSource()
    source.failure = InvalidJob("undecodable")
    async with make_inbox(source) as inbox:
        await waiting(inbox, "a")
        source.failure = None
        recorded = source.answer("a")
        assert await waiting(inbox, "a") == recorded


async def test_one_task_serves_all_and_ends_when_nobody_waits() -> None:
    source = ScriptedSource()
    source.hashes = dict.fromkeys(f"job-{n}" for n in range(50))
    before = asyncio.all_tasks()
    async with make_inbox(source) as inbox:
        answers = [waiting(inbox, name) for name in source.hashes]
        assert len(asyncio.all_tasks() - before) == 1
        for name in list(source.hashes):
            source.answer(name)
        await asyncio.gather(*answers)
        async with asyncio.timeout(5):
            while asyncio.all_tasks() - before:
                await asyncio.sleep(0.001)
        source.hashes["later"] = None
        later = waiting(inbox, "later")
        recorded = source.answer("later")
        assert await later == recorded


async def test_a_dropped_watch_is_not_delivered() -> None:
    source = ScriptedSource()
    source.hashes = {"a": None, "b": None}
    delivered: list[Answer] = []
    async with make_inbox(source) as inbox:
        watch = inbox.watch(JobId("a"), lambda _, answer: delivered.append(answer))
        other = waiting(inbox, "b")
        inbox.drop(watch)
        inbox.drop(watch)
        source.answer("a")
        source.answer("b")
        await other
    assert delivered == []


async def test_closing_tells_those_who_wait() -> None:
    source = ScriptedSource()
    source.hashes = {"a": None}
    async with make_inbox(source) as inbox:
        answer = waiting(inbox, "a")
        await until(source, "read", 1)
    with pytest.raises(QueueUnavailable, match="closed"):
        raise await answer  # type: ignore[misc]
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("after", range(8))
async def test_closing_ends_the_task_whatever_it_is_doing(before: int, after: int) -> None:
    """A cancellation that meets another event in the same turn of the loop must not be swallowed."""
    inbox = Inbox(ScriptedSource(), patience=Patience(5), poll=0.002)
    watch = inbox.watch(JobId("a"), lambda *_: None)
    for _ in range(before):
        await asyncio.sleep(0)
    inbox.drop(watch)
    for _ in range(after):
        await asyncio.sleep(0)
    async with asyncio.timeout(2):
        await inbox.close()
