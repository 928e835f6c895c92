"""Claims jobs for the room there is, prepares them off the engine thread, hands them over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from tidemill.errors import QueueUnavailable
from tidemill.jobs import Priority, Result
from tidemill.moves import Claimed
from tidemill.queue import Queue
from tidemill_worker.admission import PRIORITIES, Admission
from tidemill_worker.engine_thread import EngineThread
from tidemill_worker.held import HeldJob, HeldJobs
from tidemill_worker.isolation import Isolation
from tidemill_worker.request import Request
from tidemill_worker.waiting import pauses, unless

DOORBELL_TIMEOUT = 1.0
"""Seconds to wait for new work before looking again (for due retries, say)."""
BITE = 16
"""Jobs that one claim takes at most. A burst wakes all idle workers: each has its turn, none takes all."""
URGENT_PART = 8
"""A full worker takes up to this part of its capacity on top, for jobs that may not wait."""
URGENT_INTERVAL = 0.25
"""Seconds between a full worker's looks for such jobs, for the doorbell would ring for all others too; and
for room that nobody tells it of, such as what a cancelled job leaves in the engine."""
MAX_WAITING_BYTES = 256 << 20
"""Of results that Redis has not taken yet; while there are more, no jobs are claimed."""


class Intake:
    """Keeps the engine's places filled, and a few more jobs ready behind them.

    When they are taken it still claims jobs of a higher priority than the lowest of those it holds,
    which make way for them in the engine (vllm#40004).

    Args:
        worker: the name the jobs are claimed under.
        fingerprint: of this worker's build: what was generated under another one is begun anew.
        capacity: generations held at once, running and prepared; no more jobs are claimed when there
            are so many. A job's number of them is known once it is decoded.
        claim_ahead: how many of these the engine is not meant to run yet. If one step takes in more than
            these, and ends them too, the next one may be smaller than it could be.
        engine: where prepared jobs go.
        changed: set whenever there may be more room: a job has ended, or the engine took some in.
        reclaim_interval: seconds between looks for jobs whose worker has gone.
        answer: hands over the result of a job that never reaches the engine.
        claimed: told of the jobs just claimed.
        unreachable: told of each call that Redis did not answer.
    """

    def __init__(
        self,
        queue: Queue,
        admission: Admission,
        held: HeldJobs,
        *,
        worker: str,
        fingerprint: str,
        capacity: int,
        claim_ahead: int,
        engine: EngineThread,
        changed: asyncio.Event,
        reclaim_interval: float,
        answer: Callable[[HeldJob, Result], None],
        claimed: Callable[[Sequence[HeldJob]], None],
        unreachable: Callable[[QueueUnavailable], None],
    ) -> None:
        self._queue = queue
        self._admission = admission
        self._held = held
        self._worker = worker
        self._fingerprint = fingerprint
        self._capacity = capacity
        self._claim_ahead = claim_ahead
        self._engine = engine
        self._changed = changed
        self._reclaim_interval = reclaim_interval
        self._answer = answer
        self._claimed = claimed
        self._unreachable = unreachable
        self._next_reclaim = 0.0
        self._refused = False
        self._serves_suspect = False
        # Of jobs held, like the results above: what is held bounds both.
        self._slow: asyncio.Queue[tuple[Claimed, HeldJob]] = asyncio.Queue()
        self._turn = asyncio.Lock()
        self._num_preparing = 0
        self._stopping = asyncio.Event()
        self._isolation = Isolation(
            queue,
            held,
            worker=worker,
            is_quiet=self._is_quiet,
            changed=changed,
            stopping=self._stopping,
            unreachable=unreachable,
        )
        self._log = structlog.get_logger()

    def stop(self) -> None:
        """Claim nothing more. A claim in progress is completed: its jobs must not be forgotten."""
        self._stopping.set()

    async def run(self) -> None:
        """Claim until stopped."""
        waits = pauses()
        while not self._stopping.is_set():
            try:
                await self._take()
            except QueueUnavailable as error:
                waits = waits if self._refused else pauses()
                self._note_refusal(error)
                await unless(self._stopping, asyncio.sleep(next(waits)))

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
    def is_paused(self) -> bool:
        """Whether no jobs are claimed though there may be places.

        Because Redis refuses, too much waits for it, or a suspect is to be alone.
        """
        return self._refused or self._is_overloaded or self._serves_suspect

    @property
    def room(self) -> int:
        """Jobs that may be claimed now; none while anything piles up that was to pass through."""
        return 0 if self._is_overloaded else max(0, self._places - self._held.num_generations)

    @property
    def _is_overloaded(self) -> bool:
        """What bounds the memory of a worker when Redis takes no results, or the engine no requests."""
        return (
            self._held.num_unrecorded >= self._capacity
            or self._held.unrecorded_bytes >= MAX_WAITING_BYTES
            or self._engine.backlog >= self._capacity
        )

    @property
    def _places(self) -> int:
        """Generations of use here now: an engine that lets some wait has no place for more.

        Whether it lacks slots, tokens or memory is all the same, and so is whether those that wait are
        new or were preempted: what it cannot run is better left to other workers. What it can run is not
        only what still runs after a step but also what ended with it: of prompts with an answer of one
        token, all.
        """
        stats = self._engine.stats
        if stats.num_without_room == 0:
            return self._capacity
        num_runnable = max(stats.num_running, stats.num_rows, 1)  # 1: who holds nothing always has a place
        return min(self._capacity, num_runnable + self._claim_ahead)

    def _note_refusal(self, error: QueueUnavailable) -> None:
        """Said once, however often it is tried in vain."""
        self._unreachable(error)
        if not self._refused:
            self._log.warning("claim_failed", reason=str(error))
        self._refused = True

    def _note_answer(self) -> None:
        if self._refused:
            self._log.info("claims_resumed")
        self._refused = False

    async def _take(self) -> None:
        """One look at the queue, then a wait: for room if there is none, for work if there is none."""
        self._changed.clear()
        room = min(self.room, BITE)
        if room > 0:
            claimed = await self._reclaim_if_due(room) or await self._claim(room)
        else:
            claimed = await self._claim_urgent()
        if claimed:
            self._note_answer()
            await self._prepare(claimed)
        elif room > 0:
            await unless(self._stopping, self._queue.wait(DOORBELL_TIMEOUT))
            self._note_answer()
        else:
            await unless(self._stopping, self._changed.wait(), timeout=URGENT_INTERVAL)

    async def _claim(self, room: int, *, above: Priority | None = None) -> Sequence[Claimed]:
        return await self._queue.claim(self._worker, room, above=above, fingerprint=self._fingerprint)

    async def _claim_urgent(self) -> Sequence[Claimed]:
        """No more than there are jobs that can make way for them, and a few at a time."""
        held = sorted(self._held.num_by_priority.elements(), key=PRIORITIES.__getitem__)
        served = held[: self._places]  # with those next in turn
        lowest = served[-1] if served else Priority.HIGH
        on_top = self._capacity + max(1, self._capacity // URGENT_PART) - self._held.num_live
        room = min(on_top, served.count(lowest))
        if lowest is Priority.HIGH or room <= 0 or self._is_overloaded:
            return ()
        claimed = await self._claim(room, above=lowest)
        self._note_answer()
        return claimed

    async def _reclaim_if_due(self, room: int) -> Sequence[Claimed]:
        now = time.monotonic()
        if now < self._next_reclaim:
            return ()
        claimed = await self._queue.reclaim(self._worker, room, fingerprint=self._fingerprint)
        if not claimed:
            self._next_reclaim = now + self._reclaim_interval
        else:
            self._log.info("reclaimed", jobs=len(claimed))
        return claimed

    async def _prepare(self, claimed: Sequence[Claimed]) -> None:
        held = [self._admission.hold(one) for one in claimed]
        for job in held:
            for superseded in self._held.hold(job):
                self._engine.abort(superseded.request_id)
        self._claimed(held)
        for one, job in zip(claimed, held, strict=True):
            self._log.debug("claimed", job=job.id, attempt=job.attempt)
            if one.alone:
                await self._run_alone(one, job)
            elif self._admission.takes_long(one):
                self._slow.put_nowait((one, job))
            else:
                await self._prepare_one(one, job)

    async def _run_alone(self, claimed: Claimed, suspect: HeldJob) -> None:
        """Nothing is claimed meanwhile; there is one at most, the last of a claim."""
        self._serves_suspect = True
        if await self._isolation.admit(suspect):
            await self._prepare_one(claimed, suspect)
            await self._isolation.over(suspect)
        self._serves_suspect = False

    async def _prepare_one(self, claimed: Claimed, job: HeldJob) -> None:
        if job.ended:
            return
        self._num_preparing += 1
        try:
            prepared = await asyncio.to_thread(self._admission.prepare, claimed, job)
        finally:
            self._num_preparing -= 1
        self._hand_over(job, prepared)

    def _is_quiet(self) -> bool:
        """Whether no job, though it may have ended, still has anything done to it but be answered."""
        return self._num_preparing == 0 and self._engine.is_idle

    def _hand_over(self, job: HeldJob, prepared: Request | Result) -> None:
        if isinstance(prepared, Result):
            if self._held.end(job.request_id) is not None:
                self._answer(job, prepared)
            return
        self._engine.submit(prepared)
        if job.ended:  # while it was being prepared: lost or cancelled
            self._engine.abort(job.request_id)
