"""The answers of many jobs, against a source that the test controls."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

import pytest

from tests.tidemill.factories import make_result
from tests.tidemill.scripted_source import ScriptedSource, make_inbox
from tidemill.completion import Completion
from tidemill.errors import JobConflict, JobUnknown
from tidemill.inbox import Inbox
from tidemill.jobs import JobId, Result


def ids(*names: str) -> list[JobId]:
    return [JobId(name) for name in names]


def make_completion(inbox: Inbox, *, window: int = 100) -> Completion:
    return Completion(inbox, window=window)


async def collect(results: AsyncGenerator[Result, None]) -> list[str]:
    return [result.id async for result in results]


async def test_answers_come_in_the_order_in_which_they_are_given() -> None:
    source = ScriptedSource()
    source.hashes = dict.fromkeys("abc")
    async with make_inbox(source) as inbox:
        results = make_completion(inbox).results(ids("a", "b", "c"), timeout=5)
        seen = []
        for name in ("c", "a", "b"):
            source.answer(name)
            seen.append((await anext(results)).id)
        assert seen == ["c", "a", "b"]
        assert await collect(results) == []


async def test_unknown_jobs_are_told_after_all_other_answers() -> None:
    source = ScriptedSource()
    source.answer("a")
    source.answer("b")
    seen = []
    async with make_inbox(source) as inbox:
        with pytest.raises(JobUnknown, match=r"lost-0 .*lost-4 .*and 3 others"):
            async for result in make_completion(inbox).results(
                ids("a", *(f"lost-{n}" for n in range(8)), "b"), timeout=5
            ):
                seen.append(result.id)
    assert sorted(seen) == ["a", "b"]


async def test_no_more_than_a_window_of_jobs_is_held() -> None:
    """Given far more jobs than the window, the ids are taken as answers come, never ahead of them."""
    source = ScriptedSource()
    total, window, taken, given, ahead = 5000, 50, 0, 0, 0

    def names() -> Iterator[JobId]:
        nonlocal taken, ahead
        for number in range(total):
            taken += 1
            ahead = max(ahead, taken - given)
            source.answer(f"job-{number}", stream=False)
            yield JobId(f"job-{number}")
            source.hashes.pop(f"job-{number - 4 * window}", None)

    async with make_inbox(source) as inbox:
        async for _ in make_completion(inbox, window=window).results(names(), timeout=30):
            given += 1
        assert given == total
        # One more id is in the feeder's hand; a batch of answers may be on its way.
        assert ahead <= 2 * window + 1


class FreshResults(ScriptedSource):
    """Makes each result anew, as one that comes over a wire is, and knows how many are still held."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Result]] = []

    async def look(self, job_ids: Sequence[JobId]) -> Sequence[Result | JobUnknown | None]:
        await asyncio.sleep(0)
        results = [make_result(job_id) for job_id in job_ids]
        self._made += map(weakref.ref, results)
        return results

    @property
    def num_held(self) -> int:
        return sum(made() is not None for made in self._made)


async def test_results_do_not_pile_up_before_a_slow_consumer() -> None:
    """celery#6963: given far more answers than are consumed, those that nobody took are not held."""
    source, window, held = FreshResults(), 20, []
    names = (JobId(f"job-{number}") for number in range(400))
    async with make_inbox(source) as inbox:
        async for _ in make_completion(inbox, window=window).results(names, timeout=60):
            for _ in range(20):
                await asyncio.sleep(0)  # whatever can be read ahead is read now
            held.append(source.num_held)
    assert len(held) == 400
    assert max(held) <= window + 1  # and the one in the consumer's hand


async def test_answers_come_while_ids_are_still_awaited() -> None:
    source = ScriptedSource()
    source.answer("a")
    more = asyncio.Event()

    async def slowly() -> AsyncIterator[JobId]:
        yield JobId("a")
        await more.wait()
        source.answer("b")
        yield JobId("b")

    async with make_inbox(source) as inbox:
        results = make_completion(inbox).results(slowly(), timeout=5)
        assert (await anext(results)).id == "a"
        more.set()
        assert await collect(results) == ["b"]


async def test_an_error_of_the_ids_comes_after_the_answers() -> None:
    source = ScriptedSource()
    source.answer("a")

    def failing() -> Iterator[JobId]:
        yield JobId("a")
        raise JobConflict("job b")

    async with make_inbox(source) as inbox:
        results = make_completion(inbox).results(failing(), timeout=5)
        assert (await anext(results)).id == "a"
        with pytest.raises(JobConflict, match="job b"):
            await anext(results)


async def test_one_id_given_twice_is_answered_twice() -> None:
    source = ScriptedSource()
    source.answer("a")
    async with make_inbox(source) as inbox:
        assert await collect(make_completion(inbox).results(ids("a", "a"), timeout=5)) == ["a", "a"]


async def test_no_ids_give_no_answers() -> None:
    async with make_inbox(ScriptedSource()) as inbox:
        assert await collect(make_completion(inbox).results([], timeout=None)) == []


async def test_the_time_limit_counts_for_all_together() -> None:
    source = ScriptedSource()
    source.hashes = {"a": None}
    source.answer("b")
    async with make_inbox(source) as inbox:
        results = make_completion(inbox).results(ids("a", "b"), timeout=0.05)
        assert (await anext(results)).id == "b"
        with pytest.raises(TimeoutError, match="unfinished"):
            await anext(results)


async def test_leaving_early_ends_everything_behind_it() -> None:
    source = ScriptedSource()
    source.hashes = dict.fromkeys(f"job-{n}" for n in range(10))
    source.answer("job-3")
    before = asyncio.all_tasks()
    async with make_inbox(source) as inbox:
        results = make_completion(inbox, window=4).results(map(JobId, list(source.hashes)), timeout=None)
        assert (await anext(results)).id == "job-3"
        await results.aclose()
        async with asyncio.timeout(5):
            while asyncio.all_tasks() - before:
                await asyncio.sleep(0.001)
