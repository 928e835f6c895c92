"""The worker while it serves: threads and tasks, how they meet, and how they stop.

    I/O loop (main thread)      engine thread           lease thread
    claim ─ prepare ─ submit ─► add, step ─► outputs
                                    │ tokens ─► held jobs ─► renew with checkpoints
    record ◄─ result ◄─ writer ◄────┘                      ─► cancelled, lost

The engine thread never waits for Redis. Stop order: claim nothing more; let run what ends within
the grace period; stop the engine; record what is finished; hand back the rest; close.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import structlog

from tidemill.card import ModelCard
from tidemill.errors import QueueUnavailable
from tidemill.jobs import Result
from tidemill.moves import QueueSettings
from tidemill.queue import Queue
from tidemill_worker.admission import Admission
from tidemill_worker.engine import StepOutput
from tidemill_worker.engine_thread import EngineThread, SteppedEngine
from tidemill_worker.held import HeldJob, HeldJobs, RequestId, request_id
from tidemill_worker.intake import Intake
from tidemill_worker.leases import LeaseKeeper, OpenQueue
from tidemill_worker.recorder import Recorder, pauses

CARD_INTERVAL = QueueSettings().card_ttl / 3
"""Seconds between publications of the model card, which lives three times as long."""
CLOSING_TIME = 5.0
"""Seconds after the grace period for recording and handing back, however Redis is."""


class Observer(Protocol):
    """Sees everything worth counting; see `tidemill_worker.metrics`."""

    def claimed(self, jobs: Sequence[HeldJob]) -> None:
        """Jobs were claimed."""

    def progressed(self, held: HeldJob, output: StepOutput) -> None:
        """A step brought this to a job."""

    def ended(self, held: HeldJob, result: Result) -> None:
        """A job has got its result."""


@dataclass(frozen=True)
class ServiceConfig:
    """How one worker serves. Seconds throughout."""

    worker: str
    """Name the leases are held under; unique per start of a process."""
    capacity: int
    """Generations in the engine or on their way to it, from which on no more jobs are claimed."""
    claim_ahead: int
    """Those of them that are to be ready for the next free place; see `Intake`."""
    lease: float
    renewal: float
    stream_interval: float
    grace_period: float


class Service:
    """Serves one queue until told to stop."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        engine: SteppedEngine,
        admission: Admission,
        card: ModelCard,
        open_queue: OpenQueue,
        observer: Observer,
    ) -> None:
        self._config = config
        self._admission = admission
        self._answers = admission.answers
        self._card = card
        self._open_queue = open_queue
        self._observer = observer
        self.held = HeldJobs()
        self.engine = EngineThread(
            engine, capacity=config.capacity, deliver=self._deliver, on_failure=self._fail
        )
        self._leases = LeaseKeeper(
            open_queue,
            self.held,
            worker=config.worker,
            interval=config.renewal,
            stream_interval=config.stream_interval,
            on_lost=self._lose,
            on_cancelled=self._cancel,
            on_failure=self._fail,
        )
        self._log = structlog.get_logger()
        # One with many logprobs takes a second, in which steps go on.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tidemill-writer")
        self._num_without_room = 0
        self._drain = asyncio.Event()
        self._release = asyncio.Event()
        self._failed = False

    async def run(self) -> bool:
        """Serve until `request_stop`, or until a part fails.

        Returns:
            Whether everything held was finished or handed back.
        """
        self._loop = asyncio.get_running_loop()
        async with self._open_queue() as queue:
            self._recorder = Recorder(queue, self.held, worker=self._config.worker)
            intake = self._intake(queue)
            claiming = self._start(intake.run(), "intake")
            others = [
                self._start(intake.run_slow(), "compiler"),
                self._start(self._recorder.run(), "recorder"),
                self._start(self._publish_card(queue), "card"),
            ]
            self.engine.start()
            self._leases.start()
            self._log.info("serving", queue=queue.name, worker=self._config.worker)
            try:
                await self._drain.wait()
                intake.stop()
                # Never cancelled in mid-claim: what it has claimed must be known.
                await asyncio.wait({claiming}, timeout=CLOSING_TIME)
                return await self._close(queue)
            finally:
                await asyncio.to_thread(self._stop_threads)
                for task in (claiming, *others):
                    task.cancel()
                await asyncio.gather(claiming, *others, return_exceptions=True)

    def request_stop(self) -> None:
        """First call: drain. Second call: release everything at once. On the I/O loop."""
        if self._drain.is_set():
            self._log.info("releasing", jobs=self.held.num_live)
            self._release.set()
        else:
            self._log.info("draining", jobs=self.held.num_live, grace_period=self._config.grace_period)
            self._drain.set()

    def stop_on_signals(self) -> None:
        """Let SIGTERM and SIGINT request the stop. Call on the I/O loop's own thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.request_stop)

    def _intake(self, queue: Queue) -> Intake:
        return Intake(
            queue,
            self._admission,
            self.held,
            worker=self._config.worker,
            capacity=self._config.capacity,
            claim_ahead=self._config.claim_ahead,
            stats=lambda: self.engine.stats,
            reclaim_interval=self._config.lease / 3,
            submit=self.engine.submit,
            abort=self.engine.abort,
            answer=self._answer,
            changed=self._recorder.changed,
            claimed=self._observer.claimed,
        )

    async def _publish_card(self, queue: Queue) -> None:
        while True:
            for pause in pauses():
                try:
                    await queue.publish_card(self._card)
                    break
                except QueueUnavailable as error:
                    self._log.debug("card_not_published", reason=str(error))
                    await asyncio.sleep(pause)
            await asyncio.sleep(CARD_INTERVAL)

    async def _close(self, queue: Queue) -> bool:
        """The stop order of this module's heading."""
        await self._until_empty(self._config.grace_period)
        await asyncio.to_thread(self._stop_threads)
        deadline = time.monotonic() + CLOSING_TIME
        await self._by(deadline, self._all_recorded())
        if self._failed:
            # What broke the engine may be one of these jobs: their leases lapse, so that the
            # attempt counts, and a job that breaks every worker ends among the dead letters.
            return False
        handed_back = await self._by(deadline, self._hand_back(queue))
        if not handed_back or len(self.held):
            self._log.error("not_handed_back", jobs=len(self.held), remedy="their leases will lapse")
            return False
        self._log.info("stopped")
        return True

    async def _until_empty(self, timeout: float) -> None:
        """Until nothing is held, `timeout` has passed, or there is no point in waiting."""
        deadline = time.monotonic() + timeout
        while len(self.held) and not self._release.is_set() and time.monotonic() < deadline:
            self._recorder.changed.clear()
            waits = [
                asyncio.ensure_future(self._recorder.changed.wait()),
                asyncio.ensure_future(self._release.wait()),
            ]
            remaining = max(0.0, deadline - time.monotonic())
            await asyncio.wait(waits, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _all_recorded(self) -> None:
        while self.held.num_unrecorded:
            self._recorder.changed.clear()
            await self._recorder.changed.wait()

    async def _hand_back(self, queue: Queue) -> None:
        renewals = self.held.live_renewals()
        for pause in pauses():
            try:
                if renewals:
                    await queue.release(self._config.worker, renewals)
                await queue.remove_consumer(self._config.worker)
            except QueueUnavailable as error:
                self._log.warning("release_failed", reason=str(error), jobs=len(renewals))
                await asyncio.sleep(pause)
                continue
            for renewal in renewals:
                self.held.forget(request_id(renewal.job_id, renewal.attempt))
            if renewals:
                self._log.info("released", jobs=len(renewals))
            return

    async def _by(self, deadline: float, work: Awaitable[None]) -> bool:
        try:
            async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                await work
        except TimeoutError:
            return False
        return True

    def _stop_threads(self) -> None:
        self.engine.stop()
        self._leases.stop()
        self._writer.shutdown()

    def _start(self, part: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(part, name=name)
        task.add_done_callback(self._task_ended)
        return task

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        """Engine thread: take in what a step brought."""
        for held, output in self.held.record(outputs):
            self._observer.progressed(held, output)
            if output.finished:
                self._writer.submit(self._write, held, output)
        before, self._num_without_room = self._num_without_room, self.engine.stats.num_without_room
        if self._num_without_room < before:
            self._wake_intake()

    def _wake_intake(self) -> None:
        """Any thread: there may be room for more jobs."""
        self._loop.call_soon_threadsafe(self._recorder.changed.set)

    def _write(self, held: HeldJob, output: StepOutput) -> None:
        """Writer thread: the answer of a job that the engine has finished."""
        try:
            self._answer(held, self._answers.generated(held, output))
        except Exception:
            self._log.exception("answer_failed", job=held.id)
            self.held.forget(held.request_id)
            self._fail()

    def _answer(self, held: HeldJob, result: Result) -> None:
        """Any thread: a job that has ended gets its result."""
        self._observer.ended(held, result)
        self._recorder.put(held, result)

    def _lose(self, request: RequestId) -> None:
        """Lease thread: the job is another's now; an ended one only awaits its record's reply."""
        held = self.held.end(request)
        if held is not None:
            self._log.warning("lease_lost", job=held.id, attempt=held.attempt)
            self.engine.abort(request)
            self.held.forget(request)
            self._wake_intake()

    def _cancel(self, request: RequestId) -> None:
        """Lease thread: end a job now, with what there is of it."""
        held = self.held.end(request)
        if held is not None:
            self.engine.abort(request)
            self._answer(held, self._answers.cancelled(held))

    def _fail(self) -> None:
        """Any thread: a part has broken; stop without waiting for jobs that cannot end."""
        self._failed = True

        def stop() -> None:
            self._drain.set()
            self._release.set()

        self._loop.call_soon_threadsafe(stop)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._log.error("task_failed", task=task.get_name(), exc_info=task.exception())
            self._fail()
