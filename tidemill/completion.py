"""The answers to many jobs in the order in which they come, in constant memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from contextlib import aclosing
from typing import TypeVar

from tidemill.errors import JobUnknown
from tidemill.inbox import Answer, Inbox, Watch, end
from tidemill.jobs import JobId, Result

T = TypeVar("T")

UNKNOWN_NAMED = 5
"""How many unknown jobs the error at the end names; it counts the others."""


class Completion:
    """Waits for a window of jobs at a time and takes in the next one for each that was answered."""

    def __init__(self, inbox: Inbox, *, window: int) -> None:
        self._inbox = inbox
        self._room = asyncio.Semaphore(window)
        self._answers: asyncio.Queue[tuple[Watch, Answer] | None] = asyncio.Queue()
        self._pending: set[Watch] = set()
        self._fed = False
        self._unknown: list[str] = []
        self._num_unknown = 0

    async def results(
        self, job_ids: Iterable[JobId] | AsyncIterable[JobId], *, timeout: float | None
    ) -> AsyncGenerator[Result, None]:
        """What `Client.as_completed` promises."""
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        feeder = asyncio.create_task(self._feed(job_ids), name="tidemill-feed")
        try:
            while (answer := await self._next(deadline)) is not None:
                if isinstance(answer, Result):
                    yield answer
                elif isinstance(answer, JobUnknown):
                    self._note_unknown(answer)
                else:
                    raise answer
            await feeder  # an error of `job_ids` itself comes after the answers it gave us jobs for
            self._raise_unknown()
        finally:
            await end(feeder)
            for watch in self._pending:
                self._inbox.drop(watch)

    async def _feed(self, job_ids: Iterable[JobId] | AsyncIterable[JobId]) -> None:
        try:
            async with aclosing(each(job_ids)) as source:
                async for job_id in source:
                    await self._room.acquire()
                    self._pending.add(self._inbox.watch(job_id, self._take))
        finally:
            self._answers.put_nowait(None)

    def _take(self, watch: Watch, answer: Answer) -> None:
        self._answers.put_nowait((watch, answer))

    async def _next(self, deadline: float | None) -> Answer | None:
        """The next answer; `None` after the last."""
        while self._pending or not self._fed:
            try:
                async with asyncio.timeout_at(deadline):
                    taken = await self._answers.get()
            except TimeoutError:
                raise TimeoutError("timed out with jobs still unfinished") from None
            if taken is None:
                self._fed = True
                continue
            watch, answer = taken
            self._pending.remove(watch)
            self._room.release()
            return answer
        return None

    def _note_unknown(self, error: JobUnknown) -> None:
        self._num_unknown += 1
        if len(self._unknown) < UNKNOWN_NAMED:
            self._unknown.append(str(error))

    def _raise_unknown(self) -> None:
        if self._num_unknown:
            others = self._num_unknown - len(self._unknown)
            raise JobUnknown("; ".join(self._unknown) + (f"; and {others} others" if others else ""))


async def each(items: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T, None]:
    """One way to walk both kinds of iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
