"""Lets a job that may bring its worker down run with nothing beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from tidemill.errors import QueueUnavailable
from tidemill.moves import Renewal
from tidemill.queue import Queue
from tidemill_worker.held import HeldJob, HeldJobs
from tidemill_worker.waiting import pauses, unless

LOOK_INTERVAL = 0.1
"""Seconds between looks for what nobody tells: that the engine has ended its step, or a deadline has come."""


class Isolation:
    """Keeps a suspect aside until all else has ended, and everything else out until the suspect has.

    Aside it is not decoded, and its lease is renewed like any other; that the lease lapses then is no
    failure. A suspect that is cancelled, comes to its deadline, or is still aside when the worker stops, is
    handed back as it is: whatever takes it up next answers it.

    Args:
        is_quiet: whether nothing is in the engine, on its way there, or in preparation.
        changed: set whenever a job has ended.
        stopping: set once and for all when the worker takes no more jobs.
        unreachable: told of each call that Redis did not answer.
    """

    def __init__(
        self,
        queue: Queue,
        held: HeldJobs,
        *,
        worker: str,
        is_quiet: Callable[[], bool],
        changed: asyncio.Event,
        stopping: asyncio.Event,
        unreachable: Callable[[QueueUnavailable], None],
    ) -> None:
        self._queue = queue
        self._held = held
        self._worker = worker
        self._is_quiet = is_quiet
        self._changed = changed
        self._stopping = stopping
        self._unreachable = unreachable
        self._log = structlog.get_logger()

    async def admit(self, suspect: HeldJob) -> bool:
        """Return once the suspect, held aside, may run with nothing beside it; false if it is not to run."""
        self._log.info("suspect_aside", job=suspect.id, attempt=suspect.attempt, jobs=self._held.num_live - 1)
        if await self._until_alone(suspect) and await self._begin(suspect):
            self._log.info("suspect_begun", job=suspect.id, attempt=suspect.attempt)
            return True
        await self._hand_back(suspect)
        return False

    async def over(self, suspect: HeldJob) -> None:
        """Return once the suspect has ended and nothing of it is left in the engine."""
        while not (self._stopping.is_set() or (suspect.ended and self._is_quiet())):
            await self._look()

    async def _until_alone(self, suspect: HeldJob) -> bool:
        while not self._is_unwanted(suspect):
            if self._held.num_live == 1 and self._is_quiet():
                return True
            await self._look()
        return False

    async def _begin(self, suspect: HeldJob) -> bool:
        """Announce the attempt, which counts from then on; false if it is not to be made any more."""
        for pause in pauses():
            if self._is_unwanted(suspect):
                return False
            try:
                begun = await self._queue.begin(self._worker, suspect.id, suspect.attempt)
            except QueueUnavailable as error:
                self._unreachable(error)
                await unless(self._stopping, asyncio.sleep(pause))
                continue
            if not begun and self._held.end(suspect.request_id) is not None:
                self._log.warning("lease_lost", job=suspect.id, attempt=suspect.attempt)
                self._held.forget(suspect.request_id)
            return begun and self._held.take_from_aside(suspect.request_id)
        raise AssertionError("pauses have no end")

    async def _hand_back(self, suspect: HeldJob) -> None:
        """Not counted as a failure. When stopping without Redis, it is left to the stop's own last try."""
        for pause in pauses():
            if suspect.ended:
                return
            try:
                await self._queue.release(self._worker, [Renewal(suspect.id, suspect.attempt)])
            except QueueUnavailable as error:
                self._unreachable(error)
                if self._stopping.is_set():
                    return
                await unless(self._stopping, asyncio.sleep(pause))
                continue
            self._log.info("suspect_released", job=suspect.id, attempt=suspect.attempt)
            self._held.end(suspect.request_id)
            self._held.forget(suspect.request_id)
            self._changed.set()
            return

    def _is_unwanted(self, suspect: HeldJob) -> bool:
        late = suspect.deadline is not None and suspect.deadline <= time.monotonic()
        return self._stopping.is_set() or suspect.ended or suspect.cancelled or late

    async def _look(self) -> None:
        """Wait until something may have changed."""
        self._changed.clear()
        await unless(self._stopping, self._changed.wait(), timeout=LOOK_INTERVAL)
