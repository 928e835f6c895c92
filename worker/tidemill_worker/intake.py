"""Claims jobs for the room there is, prepares them off the engine thread, hands them over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog

from tidemill.errors import QueueUnavailable
from tidemill.jobs import Priority, Result
from tidemill.moves import Claimed
from tidemill.queue import Queue
from tidemill_worker.admission import PRIORITIES, Admission
from tidemill_worker.engine import EngineStats
from tidemill_worker.held import HeldJob, HeldJobs
from tidemill_worker.recorder import pauses
from tidemill_worker.request import Request

DOORBELL_TIMEOUT = 1.0
"""Seconds to wait for new work before looking again (for due retries, say)."""
BITE = 16
"""Jobs that one claim takes at most. A burst wakes all idle workers: each has its turn, none takes all."""
URGENT_PART = 8
"""A full worker takes up to this part of its capacity on top, for jobs that may not wait."""
URGENT_INTERVAL = 0.25
"""Seconds between a full worker's looks for such jobs, for the doorbell would ring for all others too; and
for room that nobody tells it of, such as what a cancelled job leaves in the engine."""


class Intake:
    """Keeps the engine's places filled, and a few more jobs ready behind them.

    When they are taken it still claims jobs of a higher priority than the lowest of those it holds,
    which make way for them in the engine (vllm#40004).

    Args:
        capacity: generations held at once, running and prepared; no more jobs are claimed when there
            are so many. A job's number of them is known once it is decoded.
        claim_ahead: how many of these the engine is not meant to run yet. If one step takes in more than
            these, and ends them too, the next one may be smaller than it could be.
        stats: the engine's state after its last step.
        reclaim_interval: seconds between looks for jobs whose worker has gone.
        submit, abort: hand a request to the engine, and take it back.
        answer: hands over the result of a job that never reaches the engine.
        changed: set whenever there may be more room: a job has ended, or the engine took some in.
        claimed: told of the jobs just claimed.
    """

    def __init__(
        self,
        queue: Queue,
        admission: Admission,
        held: HeldJobs,
        *,
        worker: str,
        capacity: int,
        claim_ahead: int,
        stats: Callable[[], EngineStats],
        reclaim_interval: float,
        submit: Callable[[Request], None],
        abort: Callable[[str], None],
        answer: Callable[[HeldJob, Result], None],
        changed: asyncio.Event,
        claimed: Callable[[Sequence[HeldJob]], None],
    ) -> None:
        self._queue = queue
        self._admission = admission
        self._held = held
        self._worker = worker
        self._capacity = capacity
        self._claim_ahead = claim_ahead
        self._stats = stats
        self._reclaim_interval = reclaim_interval
        self._submit = submit
        self._abort = abort
        self._answer = answer
        self._changed = changed
        self._claimed = claimed
        self._next_reclaim = 0.0
        self._slow: asyncio.Queue[tuple[Claimed, HeldJob]] = asyncio.Queue()
        self._turn = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._log = structlog.get_logger()

    def stop(self) -> None:
        """Claim nothing more. A claim in progress is completed: its jobs must not be forgotten."""
        self._stopping.set()

    async def run(self) -> None:
        """Claim until stopped."""
        while not self._stopping.is_set():
            try:
                await self._take()
            except QueueUnavailable as error:
                self._log.warning("claim_failed", reason=str(error))
                await self._until_reachable()
                self._log.info("claims_resumed")

    async def run_slow(self) -> None:
        """Prepare, one by one until cancelled, the claimed jobs that would hold up the others."""
        async with asyncio.TaskGroup() as slow:
            while True:
                slow.create_task(self._prepare_in_turn(*await self._slow.get()))

    async def _prepare_in_turn(self, claimed: Claimed, job: HeldJob) -> None:
        """No two at once; but one whose deadline passes before its turn comes needs none to be answered."""
        try:
            async with asyncio.timeout_at(job.deadline):  # the loop goes by the monotonic clock too
                await self._turn.acquire()
        except TimeoutError:
            await self._prepare_one(claimed, job)
            return
        try:
            await self._prepare_one(claimed, job)
        finally:
            self._turn.release()

    @property
    def room(self) -> int:
        """Jobs that may be claimed now; none while results pile up that cannot be recorded."""
        if self._held.num_unrecorded >= self._capacity:
            return 0
        return max(0, self._places - self._held.num_generations)

    @property
    def _places(self) -> int:
        """Generations of use here now: an engine that lets some wait has no place for more.

        Whether it lacks slots, tokens or memory is all the same, and so is whether those that wait are
        new or were preempted: what it cannot run is better left to other workers. What it can run is not
        only what still runs after a step but also what ended with it: of prompts with an answer of one
        token, all.
        """
        stats = self._stats()
        if stats.num_without_room == 0:
            return self._capacity
        num_runnable = max(stats.num_running, stats.num_rows, 1)  # 1: who holds nothing always has a place
        return min(self._capacity, num_runnable + self._claim_ahead)

    async def _until_reachable(self) -> None:
        for pause in pauses():
            await self._unless_stopped(asyncio.sleep(pause))
            try:
                return await self._take()
            except QueueUnavailable:
                if self._stopping.is_set():
                    return None

    async def _take(self) -> None:
        """One look at the queue, then a wait: for room if there is none, for work if there is none."""
        self._changed.clear()
        room = min(self.room, BITE)
        if room > 0:
            claimed = await self._reclaim_if_due(room) or await self._queue.claim(self._worker, room)
        else:
            claimed = await self._claim_urgent()
        if claimed:
            await self._prepare(claimed)
        elif room > 0:
            await self._unless_stopped(self._queue.wait(DOORBELL_TIMEOUT))
        else:
            await self._unless_stopped(self._changed.wait(), timeout=URGENT_INTERVAL)

    async def _claim_urgent(self) -> Sequence[Claimed]:
        """No more than there are jobs that can make way for them, and a few at a time."""
        held = sorted(self._held.num_by_priority.elements(), key=PRIORITIES.__getitem__)
        served = held[: self._places]  # with those next in turn
        lowest = served[-1] if served else Priority.HIGH
        room = self._capacity + max(1, self._capacity // URGENT_PART) - self._held.num_live
        if lowest is Priority.HIGH or self._held.num_unrecorded >= self._capacity:
            return ()
        return await self._queue.claim(self._worker, min(room, served.count(lowest)), above=lowest)

    async def _reclaim_if_due(self, room: int) -> Sequence[Claimed]:
        now = time.monotonic()
        if now < self._next_reclaim:
            return ()
        claimed = await self._queue.reclaim(self._worker, room)
        if not claimed:
            self._next_reclaim = now + self._reclaim_interval
        else:
            self._log.info("reclaimed", jobs=len(claimed))
        return claimed

    async def _prepare(self, claimed: Sequence[Claimed]) -> None:
        held = [self._admission.hold(one) for one in claimed]
        for job in held:
            for superseded in self._held.hold(job):
                self._abort(superseded.request_id)
        self._claimed(held)
        for one, job in zip(claimed, held, strict=True):
            if self._admission.takes_long(one):
                self._slow.put_nowait((one, job))
            else:
                await self._prepare_one(one, job)

    async def _prepare_one(self, claimed: Claimed, job: HeldJob) -> None:
        if not job.ended:
            self._hand_over(job, await asyncio.to_thread(self._admission.prepare, claimed, job))

    def _hand_over(self, job: HeldJob, prepared: Request | Result) -> None:
        if isinstance(prepared, Result):
            if self._held.end(job.request_id) is not None:
                self._answer(job, prepared)
            return
        self._submit(prepared)
        if job.ended:  # while it was being prepared: lost or cancelled
            self._abort(job.request_id)

    async def _unless_stopped(self, waiting: Awaitable[Any], *, timeout: float | None = None) -> None:
        """Wait for something that may be abandoned halfway, and no longer than until `stop`."""
        work = asyncio.ensure_future(waiting)
        stop = asyncio.ensure_future(self._stopping.wait())
        done, pending = await asyncio.wait({work, stop}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if work in done:
            work.result()
