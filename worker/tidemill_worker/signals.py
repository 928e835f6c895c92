"""What SIGTERM and SIGINT mean to a worker, from the first instant of its process to the last.

The process may be PID 1 of a container, for which the kernel knows no default action: without a handler
it would not hear of a signal at all. So one is installed before anything heavy is imported.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT)
START_EXIT_TIME = 3.0
"""Seconds in which an interrupted start has to clean up behind it. Then the process ends as it is: what was
interrupted may have swallowed the exception, as finalizers do, or be deep in native code."""


class StopSignals:
    """What a signal does depends on when it comes.

    While the worker starts, it ends the process with status 0; while it serves, it is passed on; after
    that it does no harm.
    """

    def __init__(self) -> None:
        self._respond: Callable[[], object] = self._abandon_start
        self._abandoned = False

    def pass_to(self, respond: Callable[[], object]) -> None:
        """From now on call `respond` at each signal: on the main thread, between any two instructions.

        Raises:
            SystemExit: there was a signal before, and whatever it interrupted has swallowed that.
        """
        if self._abandoned:
            raise SystemExit(0)
        self._respond = respond

    def ignore(self) -> None:
        """Hear no more signals."""
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal has come."""
        self._respond()

    def _abandon_start(self) -> None:
        if self._abandoned:
            return
        self._abandoned = True
        last_resort = threading.Timer(START_EXIT_TIME, os._exit, (0,))
        last_resort.daemon = True
        last_resort.start()
        raise SystemExit(0)


def catch_stop_signals() -> StopSignals:
    """Install the handlers on first call; afterwards return what is installed. On the main thread."""
    installed = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(installed, StopSignals):
        return installed
    signals = StopSignals()
    for number in STOPS:
        signal.signal(number, signals.handle)
    return signals
