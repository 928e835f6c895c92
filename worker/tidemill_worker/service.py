"""The worker while it serves: threads and tasks, how they meet, and how they stop.

    I/O loop (main thread)      engine thread           lease thread
    claim ─ prepare ─ submit ─► add, step ─► outputs
                                    │ tokens ─► held jobs ─► renew with checkpoints
    record ◄─ result ◄─ writer ◄────┘                      ─► cancelled, lost

The engine thread never waits for Redis. How it stops is told in `closing`; what ends it if it
cannot, in `watchdog`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from tidemill.card import ModelCard
from tidemill.errors import QueueUnavailable
from tidemill.jobs import Result
from tidemill.queue import Queue
from tidemill.registry import WorkerReport, WorkerState
from tidemill_worker.admission import Admission
from tidemill_worker.announcer import Announcer
from tidemill_worker.closing import CLOSING_TIME, Closing
from tidemill_worker.engine import StepOutput
from tidemill_worker.engine_thread import EngineThread, SteppedEngine
from tidemill_worker.held import HeldJob, HeldJobs, RequestId
from tidemill_worker.intake import Intake
from tidemill_worker.leases import LeaseKeeper, OpenQueue
from tidemill_worker.recorder import Recorder

EXIT_TIME = 4.0
"""Seconds for the process to end when all is done. A thread that hangs, over a prompt say, gets no longer."""


class Observer(Protocol):
    """Sees everything worth counting; see `tidemill_worker.metrics`."""

    def claimed(self, jobs: Sequence[HeldJob]) -> None:
        """Jobs were claimed."""

    def progressed(self, held: HeldJob, output: StepOutput) -> None:
        """A step brought this to a job."""

    def recorded(self, held: HeldJob, result: Result) -> None:
        """The result of a job was recorded."""

    def unreachable(self, error: QueueUnavailable) -> None:
        """Redis did not do what it was asked."""


@dataclass(frozen=True)
class ServiceStats:
    """What there is to say of the service that the engine does not know."""

    intake_is_paused: bool
    num_unrecorded: int
    """Jobs that have ended and whose result Redis has not taken."""
    unrecorded_bytes: int
    """What these results come to, about."""


@dataclass(frozen=True)
class ServiceConfig:
    """How one worker serves. Seconds throughout."""

    capacity: int
    """Generations in the engine or on their way to it, from which on no more jobs are claimed."""
    claim_ahead: int
    """Those of them that are to be ready for the next free place; see `Intake`."""
    lease: float
    renewal: float
    stream_interval: float
    grace_period: float


class Service:
    """Serves one queue until told to stop.

    Args:
        card: what it serves.
        report: what is known of the worker before it serves; the rest is filled in for each heartbeat.
        open_queue: called once on the I/O loop, and once on the lease thread's.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        engine: SteppedEngine,
        admission: Admission,
        card: ModelCard,
        report: WorkerReport,
        open_queue: OpenQueue,
        observer: Observer,
    ) -> None:
        self._config = config
        self._admission = admission
        self._answers = admission.answers
        self._card = card
        self._first_report = report
        self._open_queue = open_queue
        self._observer = observer
        self.held = HeldJobs()
        self.engine = EngineThread(engine, deliver=self._deliver, on_failure=self._fail_over_jobs)
        self._leases = LeaseKeeper(
            open_queue,
            self.held,
            worker=report.name,
            interval=config.renewal,
            stream_interval=config.stream_interval,
            on_lost=self._lose,
            on_cancelled=self._cancel,
            on_failure=self._fail,
            unreachable=observer.unreachable,
        )
        self._log = structlog.get_logger()
        # One with many logprobs takes a second, in which steps go on. What waits here is held.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tidemill-writer")
        self._num_without_room = 0
        self._began = time.monotonic()
        self._intake: Intake | None = None
        self._announcer: Announcer | None = None
        self._drain = asyncio.Event()
        self._release = asyncio.Event()
        self._failed = False
        self._stalled = False
        self._may_hand_back = True
        self.has_ended_well = False
        """Whether `run` has come to its end, and to a good one."""
        self.stop_by: float | None = None
        """When the process has to have ended, by the monotonic clock, once it was told to."""

    async def run(self) -> bool:
        """Serve until `request_stop`, or until a part fails.

        Returns:
            Whether everything held was finished or handed back, and no part has failed.
        """
        self._loop = asyncio.get_running_loop()
        async with self._open_queue() as queue:
            self._recorder = Recorder(
                queue,
                self.held,
                worker=self._name,
                recorded=self._observer.recorded,
                unreachable=self._observer.unreachable,
            )
            self._intake = intake = self._make_intake(queue)
            self._announcer = announcer = self._make_announcer(queue)
            claiming = self._start(intake.run(), "intake", self._fail_over_jobs)
            announcing = self._start(announcer.run(), "announcer", self._fail)
            others = [
                self._start(intake.run_slow(), "compiler", self._fail_over_jobs),
                self._start(self._recorder.run(), "recorder", self._fail_over_jobs),
            ]
            self.engine.start()
            self._leases.start()
            self._log.info("serving", queue=queue.name, worker=self._name)
            try:
                await self._drain.wait()
                self._stop_claiming()
                closed = await self._closing(queue, claiming, announcing).run()
                self.has_ended_well = closed and not self._failed
                return self.has_ended_well
            except BaseException:
                await asyncio.to_thread(self._stop_threads)
                raise
            finally:
                self.stop_by = time.monotonic() + EXIT_TIME
                for task in (claiming, announcing, *others):
                    task.cancel()
                await asyncio.gather(claiming, announcing, *others, return_exceptions=True)

    def request_stop(self) -> None:
        """First call: drain. Second call: release everything at once. On the I/O loop."""
        jobs, grace_period = self.held.num_live, self._config.grace_period
        if self._drain.is_set():
            self._log.info("releasing", jobs=jobs)
            self._stop(release=True)
        else:
            self._log.info("draining", jobs=jobs, grace_period=grace_period)
            self._stop(release=False)

    def stall(self) -> None:
        """Any thread: the engine makes no progress. Take no more jobs, and let the leases lapse.

        What is finished is recorded as long as the process lives.
        """
        self._failed = self._stalled = True
        self._may_hand_back = False
        self._leases.let_lapse()
        self._on_loop(self._stop_claiming)

    @property
    def state(self) -> WorkerState:
        if self._stalled:
            return WorkerState.STALLED
        return WorkerState.DRAINING if self._drain.is_set() else WorkerState.SERVING

    @property
    def has_running_threads(self) -> bool:
        """Whether one of its own goes on after the end of `run`, hanging in something."""
        return self.engine.is_alive or self._leases.is_alive

    @property
    def num_unrecorded(self) -> int:
        """Jobs that have ended and whose result Redis has not taken."""
        return self.held.num_unrecorded

    def stats(self) -> ServiceStats:
        """For the metrics endpoint."""
        is_paused = self._intake is not None and self._intake.is_paused
        return ServiceStats(is_paused, self.held.num_unrecorded, self.held.unrecorded_bytes)

    @property
    def _name(self) -> str:
        return self._first_report.name

    def _make_intake(self, queue: Queue) -> Intake:
        return Intake(
            queue,
            self._admission,
            self.held,
            worker=self._name,
            fingerprint=self._first_report.fingerprint,
            capacity=self._config.capacity,
            claim_ahead=self._config.claim_ahead,
            engine=self.engine,
            changed=self._recorder.changed,
            reclaim_interval=self._config.lease / 3,
            answer=self._recorder.put,
            claimed=self._observer.claimed,
            unreachable=self._observer.unreachable,
        )

    def _make_announcer(self, queue: Queue) -> Announcer:
        return Announcer(queue, self._card, report=self._report, unreachable=self._observer.unreachable)

    def _closing(self, queue: Queue, claiming: asyncio.Task[None], announcing: asyncio.Task[None]) -> Closing:
        return Closing(
            queue,
            self.held,
            worker=self._name,
            grace_period=self._config.grace_period,
            changed=self._recorder.changed,
            release=self._release,
            claiming=claiming,
            announcing=announcing,
            stop_threads=self._stop_threads,
            may_hand_back=lambda: self._may_hand_back,
            engine_hangs=lambda: self.engine.is_alive,
        )

    def _report(self) -> WorkerReport:
        stats = self.engine.stats
        now = {
            "state": self.state,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "held": len(self.held),
            "unrecorded": self.num_unrecorded,
            "kv_usage": stats.kv_usage,
            "uptime": time.monotonic() - self._began,
        }
        return self._first_report.model_copy(update=now)

    def _stop(self, *, release: bool) -> None:
        """Drain, or hand back everything at once; the watchdog sees that it comes to an end."""
        grace_period = 0.0 if release else self._config.grace_period
        stop_by = time.monotonic() + grace_period + CLOSING_TIME
        self.stop_by = stop_by if self.stop_by is None else min(self.stop_by, stop_by)
        self._drain.set()
        if release:
            self._release.set()

    def _stop_claiming(self) -> None:
        if self._intake is not None and self._announcer is not None:
            self._intake.stop()
            self._announcer.report_now()

    def _stop_threads(self) -> None:
        self.engine.stop()
        self._leases.stop()
        self._writer.shutdown()

    def _start(
        self, part: Coroutine[None, None, None], name: str, on_failure: Callable[[], None]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(part, name=name)
        task.add_done_callback(partial(self._task_ended, on_failure))
        return task

    def _on_loop(self, callback: Callable[[], object]) -> None:
        """From any thread; of no more use if the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        """Engine thread: take in what a step brought."""
        for held, output in self.held.record(outputs):
            self._observer.progressed(held, output)
            if output.finished:
                self._writer.submit(self._write, held, partial(self._answers.generated, held, output))
        before, self._num_without_room = self._num_without_room, self.engine.stats.num_without_room
        if self._num_without_room < before:
            self._wake_intake()

    def _wake_intake(self) -> None:
        """Any thread: there may be room for more jobs."""
        self._on_loop(self._recorder.changed.set)

    def _write(self, held: HeldJob, result: Callable[[], Result]) -> None:
        """Writer thread: the answer of a job that the engine has finished, or that was cancelled."""
        try:
            self._recorder.put(held, result())
        except Exception:
            self._log.exception("answer_failed", job=held.id)
            self.held.forget(held.request_id)
            self._fail_over_jobs()

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
        held = self.held.cancel(request)
        if held is not None:
            self.engine.abort(request)
            self._writer.submit(self._write, held, partial(self._answers.cancelled, held))
        self._wake_intake()

    def _fail(self) -> None:
        """Any thread: a part has broken; stop without waiting for jobs that cannot end."""
        self._failed = True
        self._on_loop(partial(self._stop, release=True))

    def _fail_over_jobs(self) -> None:
        """Any thread: the same, of a part that was at work on jobs, one of which may be the reason."""
        self._may_hand_back = False
        self._fail()

    def _task_ended(self, on_failure: Callable[[], None], task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._log.error("task_failed", task=task.get_name(), exc_info=task.exception())
            on_failure()
