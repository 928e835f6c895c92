"""How a worker stops: in which order, and within what time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from tidemill import backoff
from tidemill.errors import QueueUnavailable
from tidemill.queue import Queue
from tidemill_worker.held import HeldJobs, request_id

RECORDING_TIME = 5.0
"""Seconds in which what is finished may still be recorded once nothing runs any more, however Redis is."""
HAND_BACK_TIME = 3.0
"""Seconds for handing back the rest, whatever recording has left of its own: without this, the jobs lie idle
until their leases lapse."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.3
"""Seconds between two tries of that, so short because there are so few."""
CLOSING_TIME = RECORDING_TIME + HAND_BACK_TIME + 2.0
"""Seconds after the grace period in which a stop is over, if nothing hangs."""


class Closing:
    """Claims nothing more; lets run what ends within the grace period; stops the engine; records what is
    finished; hands back the rest.

    Args:
        grace_period: seconds for what runs.
        changed: set whenever a job is let go of.
        release: set when there is no point in waiting for what runs.
        claiming: ends by itself, but perhaps in the middle of a claim. What that has claimed must be known;
            if Redis does not say so in time, the leases of these jobs lapse.
        announcing: must not report a worker that has left.
        stop_threads: ends the engine's thread and the others; takes a moment.
        may_hand_back: false if one of the jobs may be what has broken this worker. Their leases lapse, so
            that the attempt counts, and a job that breaks every worker ends among the dead letters.
        engine_hangs: whether the engine's thread could not be ended. Then a job that was begun alone is not
            handed back, for the same reason: such a worker may be told to stop before it finds out itself.
    """

    def __init__(
        self,
        queue: Queue,
        held: HeldJobs,
        *,
        worker: str,
        grace_period: float,
        changed: asyncio.Event,
        release: asyncio.Event,
        claiming: asyncio.Task[None],
        announcing: asyncio.Task[None],
        stop_threads: Callable[[], None],
        may_hand_back: Callable[[], bool],
        engine_hangs: Callable[[], bool],
    ) -> None:
        self._queue = queue
        self._held = held
        self._worker = worker
        self._grace_period = grace_period
        self._changed = changed
        self._release = release
        self._claiming = claiming
        self._announcing = announcing
        self._stop_threads = stop_threads
        self._may_hand_back = may_hand_back
        self._engine_hangs = engine_hangs
        self._log = structlog.get_logger()

    async def run(self) -> bool:
        """Returns whether everything held was finished or handed back."""
        await self._until_empty()
        recorded_by = time.monotonic() + RECORDING_TIME
        handed_back_by = recorded_by + HAND_BACK_TIME
        await asyncio.wait({self._claiming}, timeout=RECORDING_TIME / 2)
        self._claiming.cancel()
        await _by(recorded_by, asyncio.to_thread(self._stop_threads))
        await _by(recorded_by, self._all_recorded())
        if not self._may_hand_back():
            return False
        self._announcing.cancel()
        await asyncio.wait({self._announcing}, timeout=HAND_BACK_TIME / 3)
        await _by(handed_back_by, self._leave())
        if len(self._held):
            self._log.error("not_handed_back", jobs=len(self._held), remedy="their leases will lapse")
            return False
        self._log.info("stopped")
        return True

    async def _until_empty(self) -> None:
        """Until nothing runs any more, the grace period is over, or there is no point in waiting."""
        deadline = time.monotonic() + self._grace_period
        while self._is_under_way() and not self._release.is_set() and time.monotonic() < deadline:
            self._changed.clear()
            events = [asyncio.ensure_future(event.wait()) for event in (self._changed, self._release)]
            waits = events if self._claiming.done() else [*events, self._claiming]
            remaining = max(0.0, deadline - time.monotonic())
            await asyncio.wait(waits, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            for event in events:
                event.cancel()

    def _is_under_way(self) -> bool:
        """What is aside, and could not be handed back so far, will not run here any more."""
        return len(self._held) > self._held.num_aside or not self._claiming.done()

    async def _all_recorded(self) -> None:
        while self._held.num_unrecorded:
            self._changed.clear()
            await self._changed.wait()

    async def _leave(self) -> None:
        """Go on trying until nothing is left and Redis knows this worker no more."""
        for pause in backoff.pauses(FIRST_PAUSE, LONGEST_PAUSE):
            try:
                await self._hand_back()
                if not self._held.num_live:
                    await self._queue.remove_consumer(self._worker)
                    return
            except QueueUnavailable as error:
                self._log.warning("release_failed", reason=str(error), jobs=self._held.num_live)
            await asyncio.sleep(pause)

    async def _hand_back(self) -> None:
        renewals = self._held.live_renewals(but_alone=self._engine_hangs())
        if not renewals:
            return
        await self._queue.release(self._worker, renewals)
        for renewal in renewals:
            self._held.forget(request_id(renewal.job_id, renewal.attempt))
        self._log.info("released", jobs=len(renewals))


async def _by(deadline: float, work: Awaitable[None]) -> None:
    """Let go of it when its time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
            await work
