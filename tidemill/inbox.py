"""Waiting for answers: one background task of a client serves everybody who waits.

Most answers arrive on the client's own result stream, read by cursor. A job answered elsewhere
(submitted by another process, or under another reply name) is found through its hash, which is
looked at once when the wait begins and then again at a modest pace; so a job that vanished is
noticed too, and nobody waits forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

from tidemill.errors import JobUnknown, QueueUnavailable
from tidemill.jobs import JobId, Result
from tidemill.patience import Patience

Answer = Result | Exception
"""What a wait ends with: the result, or why there will be none."""

POLL_INTERVAL = 0.5
"""Seconds between two looks at the hashes of jobs that are still awaited."""
READ_COUNT = 64
"""Results in one reply: few enough that it fits in memory if each carries all logprobs it may have."""
LOOK_COUNT = 100
CANCEL_INTERVAL = 0.1


class Source(Protocol):
    """Where answers come from. Every method may raise `QueueUnavailable`."""

    async def tail(self) -> str:
        """A cursor that lies before every result which is recorded from now on."""
        ...

    async def read(self, cursor: str, *, count: int, block: float) -> Sequence[tuple[str, Result]]:
        """Results after `cursor`, each with its own; waits up to `block` seconds for the first."""
        ...

    async def look(self, job_ids: Sequence[JobId]) -> Sequence[Result | JobUnknown | None]:
        """The answer to each job as its hash has it; `None` for one that is not finished."""
        ...


Deliver = Callable[["Watch", Answer], None]


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """One wait for one job; `deliver` is called exactly once unless the watch is dropped first."""

    job_id: JobId
    deliver: Deliver


class Inbox:
    """Delivers answers to watches. Its task runs only while somebody waits."""

    def __init__(self, source: Source, *, patience: Patience, poll: float = POLL_INTERVAL) -> None:
        """`patience` is how long Redis may be away before those who wait are told.

        `poll` is the pause between two looks at hashes, and how long one read of the stream waits.
        """
        self._source = source
        self._poll = poll
        self._patience = patience
        self._watches: dict[JobId, set[Watch]] = {}
        self._fresh: dict[JobId, None] = {}
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loops: tuple[asyncio.Task[None], ...] = ()
        self._closed = False

    def watch(self, job_id: JobId, deliver: Deliver) -> Watch:
        """Begin to wait; `deliver` is called from the event loop and must not block."""
        watch = Watch(job_id, deliver)
        if self._closed:
            deliver(watch, _closed())
            return watch
        self._watches.setdefault(job_id, set()).add(watch)
        self._fresh[job_id] = None
        self._arrived.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="tidemill-inbox")
        return watch

    def drop(self, watch: Watch) -> None:
        """End a wait early; harmless if it was answered already."""
        watches = self._watches.get(watch.job_id)
        if watches is None:
            return
        watches.discard(watch)
        if not watches:
            del self._watches[watch.job_id]
            self._fresh.pop(watch.job_id, None)

    async def close(self) -> None:
        """Stop the task; whoever still waits, or wants to from now on, is told so."""
        self._closed = True
        self._fail(_closed())
        if self._task is not None:
            await end(self._task, *self._loops)

    async def _run(self) -> None:
        while self._watches:
            try:
                await self._serve()
            except Exception as error:
                self._fail(error)
        self._task = None

    async def _serve(self) -> None:
        """Read and look until nobody waits. The cursor comes first: an answer recorded before it is
        found by the first look, one recorded after it by the reader.
        """
        cursor = await self._patience.ride_out(self._source.tail)
        self._loops = (
            asyncio.create_task(self._read_stream(cursor), name="tidemill-reader"),
            asyncio.create_task(self._look_at_hashes(), name="tidemill-looker"),
        )
        try:
            done, _ = await asyncio.wait(self._loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            await end(*self._loops)

    async def _read_stream(self, cursor: str) -> None:
        """Ends after a read during which nobody waited, not sooner, so that waits in a row share it."""
        waited = True
        while waited or self._watches:
            waited = bool(self._watches)
            read = partial(self._source.read, cursor, count=READ_COUNT, block=self._poll)
            for position, result in await self._patience.ride_out(read):
                cursor = position
                self._deliver(result.id, result)

    async def _look_at_hashes(self) -> None:
        found = False
        while True:
            if not (found or self._fresh):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._poll):
                        await self._arrived.wait()
            self._arrived.clear()
            found = await self._look(self._next_looks())

    async def _look(self, job_ids: list[JobId]) -> bool:
        """Whether any of these jobs is settled: then more may be, and the next look comes at once."""
        if not job_ids:
            return False
        answers = await self._patience.ride_out(partial(self._source.look, job_ids))
        for job_id, answer in zip(job_ids, answers, strict=True):
            if answer is not None:
                self._deliver(job_id, answer)
        return any(answer is not None for answer in answers)

    def _next_looks(self) -> list[JobId]:
        """Those never looked at, else those not looked at for longest (the dict is in that order)."""
        chosen = list(islice(self._fresh or self._watches, LOOK_COUNT))
        for job_id in chosen:
            self._fresh.pop(job_id, None)
            self._watches[job_id] = self._watches.pop(job_id)
        return chosen

    def _deliver(self, job_id: JobId, answer: Answer) -> None:
        """Results of jobs nobody waits for are dropped here; their hashes still lead to them."""
        self._fresh.pop(job_id, None)
        for watch in self._watches.pop(job_id, ()):
            watch.deliver(watch, answer)

    def _fail(self, error: Exception) -> None:
        for job_id in list(self._watches):
            self._deliver(job_id, error)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and return when they have ended, however they do.

    Asks more than once: on Python 3.11 `asyncio.wait_for`, which an iterable that a caller gave us may
    use, swallows a cancellation that comes in the same turn of the loop as what it waits for.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL)
    await asyncio.gather(*tasks, return_exceptions=True)


def _closed() -> QueueUnavailable:
    return QueueUnavailable("the client was closed while waiting for a result")
