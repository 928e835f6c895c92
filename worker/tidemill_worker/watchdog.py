"""The thread that ends a process which cannot go on by itself.

Two things it looks for: an engine that has work and makes no progress, whether a step hangs, nothing is
planned of what waits, or the thread has vanished; and a stop that does not come to its end. Either way
the process exits for its supervisor to start another, even if some thread never returns.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import structlog

from tidemill.exit_codes import ExitCode
from tidemill_worker.closing import RECORDING_TIME
from tidemill_worker.engine import EngineStats

LOOKS = 20
"""How often it looks within the time that a stall may last."""
MAX_PAUSE = 1.0
"""Seconds between two looks at most."""


class WatchedEngine(Protocol):
    """What it needs to see of `EngineThread`."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def stuck_seconds(self) -> float: ...
    @property
    def plans_nothing(self) -> bool: ...
    @property
    def has_died(self) -> bool: ...


class Watched(Protocol):
    """What it needs of `Service`."""

    @property
    def engine(self) -> WatchedEngine: ...
    @property
    def num_unrecorded(self) -> int: ...
    @property
    def stop_by(self) -> float | None: ...
    @property
    def has_ended_well(self) -> bool: ...
    def stall(self) -> None: ...


class Watchdog:
    """Watches from entry to exit of its block.

    Args:
        service: what is watched.
        stall_timeout: seconds that work may stand still. Steps are far quicker, and whatever is slow at its
            first use has been used before the service starts, so that compiling is no stall.
        terminate: ends the process with this status, at once.
        hang_timeout: seconds after which the process ends with status 1 and a bare stack dump if no Python
            code runs at all, this thread included, because native code keeps the interpreter for itself. A
            process that was frozen for so long ends too when it is thawed; its leases are long gone. `None`:
            never.
    """

    def __init__(
        self,
        service: Watched,
        *,
        stall_timeout: float,
        terminate: Callable[[ExitCode], object],
        hang_timeout: float | None = None,
    ) -> None:
        self._service = service
        self._stall_timeout = stall_timeout
        self._terminate = terminate
        self._hang_timeout = hang_timeout
        self._pause = min(MAX_PAUSE, stall_timeout / LOOKS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tidemill-watchdog", daemon=True)
        self._log = structlog.get_logger()

    def __enter__(self) -> Self:
        self._show_life()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._hang_timeout is not None:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        stuck = 0.0
        while not self._ended.wait(self._pause):
            self._show_life()
            # No more than the time that passed here: a process that was frozen did not stand still.
            stuck = min(self._service.engine.stuck_seconds, stuck + self._pause)
            if (reason := self._stall(stuck)) is not None:
                self._end_stalled(reason)
                return
            if self._stop_is_overdue():
                self._end_overdue()
                return

    def _show_life(self) -> None:
        """Begin the time anew after which the process ends without any Python code."""
        if self._hang_timeout is not None:
            faulthandler.dump_traceback_later(self._hang_timeout, exit=True)

    def _stall(self, stuck: float) -> str | None:
        """Why the engine will not go on."""
        engine = self._service.engine
        if engine.has_died:
            return "the engine thread has vanished"
        if stuck < self._stall_timeout:
            return None
        if engine.plans_nothing:
            return f"nothing was computed of what waits for {stuck:.0f} s"
        return f"a step has not returned for {stuck:.0f} s"

    def _stop_is_overdue(self) -> bool:
        stop_by = self._service.stop_by
        return stop_by is not None and time.monotonic() > stop_by

    def _end_stalled(self, reason: str) -> None:
        """Let go of the leases, so that the attempt counts: one of the jobs may be the reason."""
        stats = self._service.engine.stats
        try:
            self._service.stall()
            self._log.error(
                "engine_stalled",
                reason=reason,
                running=stats.num_running,
                waiting=stats.num_waiting,
                steps=stats.num_steps,
                unrecorded=self._service.num_unrecorded,
                stacks=stacks(),
            )
            self._await_records()
        finally:
            self._terminate(ExitCode.STALLED)

    def _await_records(self) -> None:
        deadline = time.monotonic() + RECORDING_TIME
        while self._service.num_unrecorded and time.monotonic() < deadline:
            self._show_life()
            if self._ended.wait(0.02):
                return

    def _end_overdue(self) -> None:
        """A stop whose work is done has come to a good end, whatever thread still hangs."""
        ended_well = self._service.has_ended_well
        try:
            self._log.error("stop_overdue", unrecorded=self._service.num_unrecorded, stacks=stacks())
        finally:
            self._terminate(ExitCode.OK if ended_well else ExitCode.FAILED)


def stacks() -> str:
    """What every thread of this process is doing in Python; of one in native code, who called that."""
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )
