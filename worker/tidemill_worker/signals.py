"""What SIGTERM and SIGINT mean to a worker, from early in its process to the last instant.

The process may be PID 1 of a container, for which the kernel knows no default action: without a handler
it would not hear of a signal at all. So one is installed before anything heavy is imported. The interpreter
and what all commands share, pydantic among it, come first: a signal in these tenths of a second still has
the default action, which is none for PID 1.

A handler is called between two bytecodes of the main thread: as long as that is in native code, nothing is
heard.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """What a signal does depends on when it comes.

    While the worker starts, it ends the process with status 0; while it serves, it is passed on; after
    that it does no harm.
    """

    def __init__(self) -> None:
        self._respond: Callable[[], object] = _abandon_start

    def pass_to(self, respond: Callable[[], object]) -> None:
        """From now on call `respond` at each signal: on the main thread, between any two instructions."""
        self._respond = respond

    def ignore(self) -> None:
        """Hear no more signals."""
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal has come."""
        self._respond()


def _abandon_start() -> None:
    """End the process as it is: a worker that has not begun to serve holds nothing.

    An exception instead would come out of whatever runs at this instant. Finalizers swallow it, and native
    code that called back into Python goes on without what it asked for: the process then ends in a fault, or
    not at all.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be closed, or in the middle of writing
            stream.flush()
    os._exit(0)


def catch_stop_signals() -> StopSignals:
    """Install the handlers on first call; afterwards return what is installed. On the main thread."""
    installed = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(installed, StopSignals):
        return installed
    signals = StopSignals()
    for number in STOPS:
        signal.signal(number, signals.handle)
    return signals
