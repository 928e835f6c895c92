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
from tidemill_worker.engine import EngineStats, Request, StepOutput

JOIN_TIMEOUT = 60.0
"""Seconds to wait for the step in progress when stopping; a step takes about one."""


class SteppedEngine(Protocol):
    """What the thread needs of `tidemill_worker.engine.Engine`."""

    @property
    def has_unfinished(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class Abort:
    """Forget this request."""

    request_id: str


class Stop:
    """End the thread after the step in progress."""


Command = Request | Abort | Stop


class EngineThread:
    """Owns the engine; others reach it through a bounded inbox and its callbacks.

    Args:
        engine: used by this thread alone from `start` on.
        capacity: requests that may be in the engine or on their way at once.
        deliver: gets each step's outputs, on this thread; must be quick.
        on_failure: called on this thread, once, if the engine raises: a bug, nothing to go on from.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        *,
        capacity: int,
        deliver: Callable[[Sequence[StepOutput]], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._on_failure = on_failure
        self._inbox: queue.Queue[Command] = queue.Queue(maxsize=2 * capacity)
        self._thread = threading.Thread(target=self._run, name="tidemill-engine", daemon=True)
        self._busy_since: float | None = None
        self.stats = engine.stats()
        """The engine's state after its last step; replaced, never changed."""

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def step_seconds(self) -> float:
        """How long the step in progress has taken so far; 0 between steps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand over a request; waits while the inbox is full, at most for a step."""
        self._send(request)

    def abort(self, request_id: str) -> None:
        """Stop working on a request; its outputs may still come for one step."""
        self._send(Abort(request_id))

    def stop(self) -> None:
        """Wait for the step in progress, then end the thread. Harmless if it has ended."""
        self._send(Stop())
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT)

    def _send(self, command: Command) -> None:
        """A thread that has ended takes no commands, and nobody waits for it."""
        while self._thread.is_alive():
            try:
                self._inbox.put(command, timeout=1.0)
                return
            except queue.Full:
                continue

    def _run(self) -> None:
        try:
            while self._obey_commands():
                self._step()
        except Exception:
            structlog.get_logger().exception("engine_failed")
            self._on_failure()

    def _step(self) -> None:
        self._busy_since = time.monotonic()
        outputs = self._engine.step()
        self._busy_since = None
        self.stats = self._engine.stats()
        self._deliver(outputs)

    def _obey_commands(self) -> bool:
        """Take what the inbox has, waiting only if there is nothing to step; false after `Stop`."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_unfinished)
            except queue.Empty:
                return True
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort(command.request_id)
                self.stats = self._engine.stats()
            else:
                self._add(command)

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except InvalidJob as error:
            info = ErrorInfo(code=error.code, message=str(error), field=error.field, limit=error.limit)
            self._deliver([StepOutput(request.id, (), "", error=info)])
