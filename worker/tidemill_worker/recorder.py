"""Records results in the queue, each exactly once, through any absence of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tidemill.errors import QueueUnavailable
from tidemill.jobs import Result
from tidemill.moves import FinishOutcome
from tidemill.queue import Queue
from tidemill_worker.held import HeldJob, HeldJobs
from tidemill_worker.waiting import pauses

CONCURRENCY = 8
"""Results on their way to Redis at once: enough to hide a round trip, few enough for one pool."""


class Recorder:
    """Takes results from any thread and hands each to the queue until it has an answer.

    What waits here is bounded by what is held: intake claims nothing while too many or too large ones wait.

    Args:
        recorded: told of each result that counts, once it is known to be recorded.
        unreachable: told of each call that Redis did not answer.
    """

    def __init__(
        self,
        queue: Queue,
        held: HeldJobs,
        *,
        worker: str,
        recorded: Callable[[HeldJob, Result], None],
        unreachable: Callable[[QueueUnavailable], None],
    ) -> None:
        self._queue = queue
        self._held = held
        self._worker = worker
        self._recorded = recorded
        self._unreachable = unreachable
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[tuple[HeldJob, Result]] = asyncio.Queue()
        self._log = structlog.get_logger()
        self.changed = asyncio.Event()
        """Set whenever a job is let go of; whoever waits clears it."""

    def put(self, held: HeldJob, result: Result) -> None:
        """Record `result`; `held` has ended. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._results.put_nowait, (held, result))

    async def run(self) -> None:
        """Record results until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(self._record_results())

    async def _record_results(self) -> None:
        while True:
            held, result = await self._results.get()
            try:
                if await self._record(held, result):
                    self._recorded(held, result)
            except Exception:
                # Not Redis's absence but a refusal: the lease lapses, another attempt is counted.
                self._log.exception("result_not_recorded", job=held.id)
            self._held.forget(held.request_id)
            self.changed.set()

    async def _record(self, held: HeldJob, result: Result) -> bool:
        """Whether it counts: by now the job may be another's."""
        for pause in pauses():
            try:
                outcome = await self._queue.finish(self._worker, held.attempt, result)
            except QueueUnavailable as error:
                self._unreachable(error)
                self._log.debug("result_waits", job=held.id, reason=str(error))
                await asyncio.sleep(pause)
                continue
            self._log.debug("result_taken", job=held.id, attempt=held.attempt, outcome=outcome)
            if outcome is FinishOutcome.LOST:
                self._log.debug("result_dropped", job=held.id, reason="the lease is another's")
            return outcome is not FinishOutcome.LOST
        raise AssertionError("pauses have no end")
