"""The thread that steps the engine. It never waits for the network, only for work."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from tidemill.errors import InvalidJob
from tidemill.jobs import ErrorInfo
from tidemill_worker.engine import EngineStats, StepOutput
from tidemill_worker.request import Request

JOIN_TIMEOUT = 3.0
"""Seconds to wait for the step in progress when stopping; a step takes about one."""

STUCK_PAUSE = 0.01
"""Seconds between two tries of an engine that has work and can do none of it."""


class SteppedEngine(Protocol):
    """What the thread needs of `tidemill_worker.engine.Engine`."""

    @property
    def has_unfinished(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def check_integrity(self) -> None: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class Abort:
    """Forget this request."""

    request_id: str


class Stop:
    """End the thread after the step in progress."""


Command = Request | Abort | Stop


class EngineThread:
    """Owns the engine; others reach it through an inbox and its callbacks.

    Nobody waits for room in the inbox: who renews leases or talks to Redis must not be held up by a long
    step. It is bounded by who fills it: `Intake` claims nothing while `backlog` is as large as the worker's
    capacity, and each request is taken back once at most.

    Args:
        engine: used by this thread alone from `start` on.
        deliver: gets each step's outputs, on this thread; must be quick. No more once `stop` has returned.
        on_failure: called on this thread, once, if the engine raises: a bug, nothing to go on from.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        *,
        deliver: Callable[[Sequence[StepOutput]], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._num_sent = 0
        self._num_obeyed = 0
        self._thread = threading.Thread(target=self._run, name="tidemill-engine", daemon=True)
        self._has_work = False
        self._last_move: float | None = None
        self._ended = False
        self._delivering = threading.Lock()
        self._given_up = False
        self.plans_nothing = False
        """Whether the last step computed nothing, though there was work."""
        self.stats = engine.stats()
        """The engine's state after its last step; replaced, never changed."""

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def has_started(self) -> bool:
        """Whether `start` was called."""
        return self._thread.ident is not None

    @property
    def has_died(self) -> bool:
        """Whether the thread is gone, and neither was told to end nor has reported a failure."""
        return self.has_started and not self.is_alive and not self._ended

    @property
    def backlog(self) -> int:
        """Commands on their way to the engine."""
        return self._num_sent - self._num_obeyed

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in the engine, nor on its way to it or out of it."""
        return self.backlog == 0 and not self._has_work

    @property
    def stuck_seconds(self) -> float:
        """How long there has been work of which nothing was computed: if steps go well, the age of this one.

        A step that hangs and a scheduler that plans nothing look the same from outside (vllm#45414).
        """
        last_move = self._last_move
        return 0.0 if last_move is None else time.monotonic() - last_move

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand over a request."""
        self._send(request)

    def abort(self, request_id: str) -> None:
        """Stop working on a request; its outputs may still come for one step."""
        self._send(Abort(request_id))

    def stop(self) -> None:
        """End the thread after the step in progress, and wait for that a little; harmless if it has ended.

        What a step brings that takes longer is dropped: whoever was to take it in is stopping too.
        """
        self._send(Stop())
        if self.is_alive:
            self._thread.join(JOIN_TIMEOUT)
        with self._delivering:
            self._given_up = True

    def _send(self, command: Command) -> None:
        with self._sending:
            self._num_sent += 1
        self._inbox.put(command)

    def _run(self) -> None:
        try:
            while self._obey_commands():
                self._step()
            self._ended = True
        except Exception:
            structlog.get_logger().exception("engine_failed")
            self._on_failure()
            self._ended = True
        finally:
            self._last_move = None

    def _step(self) -> None:
        outputs = self._engine.step()
        stats = self._engine.stats()
        self.plans_nothing = stats.num_steps == self.stats.num_steps
        if not self.plans_nothing:
            self._last_move = time.monotonic()
        self.stats = stats
        self._hand_out(outputs)
        self._has_work = self._engine.has_unfinished
        if self._inbox.empty() and not self._has_work:
            self._engine.check_integrity()

    def _hand_out(self, outputs: Sequence[StepOutput]) -> None:
        with self._delivering:
            if not self._given_up:
                self._deliver(outputs)

    def _obey_commands(self) -> bool:
        """Take what the inbox has, waiting only if there is nothing to step; false after `Stop`."""
        while True:
            try:
                command = self._inbox.get(timeout=self._patience())
            except queue.Empty:
                return True
            if isinstance(command, Stop):
                return False
            if self._last_move is None:
                self._last_move = time.monotonic()
            self._obey(command)
            self._has_work = self._engine.has_unfinished
            self._num_obeyed += 1

    def _patience(self) -> float | None:
        """Seconds to wait for a command; `None` for as long as it takes."""
        if not self._engine.has_unfinished:
            self._last_move = None
            self.plans_nothing = False
            return None
        return STUCK_PAUSE if self.plans_nothing else 0.0

    def _obey(self, command: Request | Abort) -> None:
        if isinstance(command, Abort):
            self._engine.abort(command.request_id)
            self.stats = self._engine.stats()
            return
        try:
            self._engine.add(command)
        except InvalidJob as error:
            self._hand_out([StepOutput(command.id, (), "", error=ErrorInfo.of(error))])
