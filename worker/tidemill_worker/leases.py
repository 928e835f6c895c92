"""The thread that keeps the leases: renewals, which carry the checkpoints and bring cancellations.

It has an event loop and a connection of its own, so that neither a long step of the engine nor a
slow claim can let a lease run out.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial

import structlog

from tidemill.errors import QueueUnavailable
from tidemill.moves import Renewal, RenewOutcome
from tidemill.queue import Queue
from tidemill_worker.held import HeldJobs, RequestId, request_id

OpenQueue = Callable[[], AbstractAsyncContextManager[Queue]]
"""Opens the queue with a connection that belongs to the event loop it is opened in."""

JOIN_TIMEOUT = 3.0
"""Seconds that the renewal in progress gets when stopping; without a fault it takes milliseconds."""


class LeaseKeeper:
    """Renews every held job in time, streamed jobs with news more often, and hears at once of cancellations.

    While anything is held this takes one call at every `stream_interval`, at which Redis has little to do: it
    looks into the few cancellations of this worker, and at the jobs that are renewed.

    Args:
        worker: the name the leases are held under.
        interval: seconds between renewals of all jobs.
        stream_interval: seconds between checkpoints of streamed jobs, and between looks for cancellations.
        on_lost, on_cancelled: called on this thread, one job at a time.
        on_failure: called on this thread, once, if it ends by an error.
        unreachable: called on this thread at each call that Redis did not answer.
    """

    def __init__(
        self,
        open_queue: OpenQueue,
        held: HeldJobs,
        *,
        worker: str,
        interval: float,
        stream_interval: float,
        on_lost: Callable[[RequestId], None],
        on_cancelled: Callable[[RequestId], None],
        on_failure: Callable[[], None],
        unreachable: Callable[[QueueUnavailable], None],
    ) -> None:
        self._open_queue = open_queue
        self._held = held
        self._worker = worker
        self._interval = interval
        self._stream_interval = min(stream_interval, interval)
        self._on_lost = on_lost
        self._on_cancelled = on_cancelled
        self._on_failure = on_failure
        self._on_unreachable = unreachable
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidemill-leases", daemon=True)
        self._interrupt: Callable[[], object] = lambda: None
        self._unreachable = False
        self._log = structlog.get_logger()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the renewal in progress, or amid it if Redis leaves it without an answer.

        A thread that even so does not end, because it looks up a host name say, calls nobody back any more.
        """
        self._stopping.set()
        if self.is_alive:
            self._thread.join(JOIN_TIMEOUT)
        if self.is_alive:
            with suppress(RuntimeError):  # it has closed its loop in this very moment
                self._interrupt()
            self._thread.join(JOIN_TIMEOUT)

    def let_lapse(self) -> None:
        """Renew nothing more, without waiting for the thread to end."""
        self._stopping.set()

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except asyncio.CancelledError:
            self._log.warning("renewal_abandoned", jobs=len(self._held))
            if not self._stopping.is_set():
                self._on_failure()
        except Exception:
            self._log.exception("lease_keeper_failed")
            self._on_failure()

    async def _keep(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._interrupt = partial(loop.call_soon_threadsafe, task.cancel)
        async with self._open_queue() as queue:
            next_full = time.monotonic() + self._interval
            while not self._stopping.is_set():
                now = time.monotonic()
                full = now >= next_full
                if await self._renew(queue, everything=full) and full:
                    next_full = now + self._interval
                await asyncio.sleep(self._stream_interval)

    async def _renew(self, queue: Queue, *, everything: bool) -> bool:
        """Send what is due; false if the queue could not be reached, so that it is due at once."""
        if not len(self._held):
            return True
        renewals = self._held.renewals(everything=everything)
        try:
            outcome = await self._answer_of(queue, renewals)
        except QueueUnavailable as error:
            self._on_unreachable(error)
            if not self._unreachable:
                self._log.warning("renewal_failed", reason=str(error), jobs=len(renewals))
            self._unreachable = True
            return False
        if self._unreachable:
            self._log.info("renewals_resumed", jobs=len(renewals))
        self._unreachable = False
        self._held.confirm(renewals)
        self._take_to_heart(renewals, outcome)
        return True

    async def _answer_of(self, queue: Queue, renewals: Sequence[Renewal]) -> RenewOutcome:
        """In time for another try before any lease is over, should this one stay without an answer."""
        patience = self._interval / 2
        try:
            async with asyncio.timeout(patience):
                return await queue.renew(self._worker, renewals)
        except TimeoutError as error:
            raise QueueUnavailable(f"no answer to a renewal within {patience:g} s") from error

    def _take_to_heart(self, renewals: Sequence[Renewal], outcome: RenewOutcome) -> None:
        """Pass on what it brought; it may also name a job whose claim is on its way here.

        The next full renewal names that one again.
        """
        for renewal in renewals:
            if renewal.job_id in outcome.lost:
                self._on_lost(request_id(renewal.job_id, renewal.attempt))
        for job_id in outcome.cancelled:
            attempt = self._held.live_attempt(job_id)
            if attempt is not None:
                self._on_cancelled(attempt)
