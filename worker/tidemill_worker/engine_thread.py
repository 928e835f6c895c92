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

JOIN_TIMEOUT = 60.0
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
        self._unmoved_since: float | None = None
        self.stats = engine.stats()
        """The engine's state after its last step; replaced, never changed."""

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stuck_seconds(self) -> float:
        """How long there has been work of which nothing was computed.

        A step that hangs and a scheduler that plans nothing look the same from outside (vllm#45414).
        """
        since = self._unmoved_since
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
        if self._unmoved_since is None:
            self._unmoved_since = time.monotonic()
        outputs = self._engine.step()
        stats = self._engine.stats()
        if stats.num_steps > self.stats.num_steps:
            self._unmoved_since = None
        self.stats = stats
        self._deliver(outputs)
        if self._inbox.empty() and not self._engine.has_unfinished:
            self._engine.check_integrity()

    def _obey_commands(self) -> bool:
        """Take what the inbox has, waiting only if there is nothing to step; false after `Stop`."""
        while True:
            try:
                command = self._inbox.get(timeout=self._patience())
            except queue.Empty:
                return True
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort(command.request_id)
                self.stats = self._engine.stats()
            else:
                self._add(command)

    def _patience(self) -> float | None:
        """Seconds to wait for a command; `None` for as long as it takes."""
        if not self._engine.has_unfinished:
            self._unmoved_since = None
            return None
        return 0.0 if self._unmoved_since is None else STUCK_PAUSE

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except InvalidJob as error:
            self._deliver([StepOutput(request.id, (), "", error=ErrorInfo.of(error))])
