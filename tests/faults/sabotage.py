"""What tests do to a worker from within: each process patches itself before it runs the real command.

Jobs bring their fate with them, in the beginning of their id, so that a test can send one into a crowd.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from worker_processes import run_worker

from tidemill.queue import Queue
from tidemill.registry import WorkerReport
from tidemill_worker import app
from tidemill_worker.admission import Admission
from tidemill_worker.engine import Engine

KILLS_IN_PREPARATION = "kills-in-preparation"
KILLS_IN_STEP = "kills-in-step"
HANGS_IN_STEP = "hangs-in-step"
FREEZES_BEFORE_FINISH = "freezes-before-finish"

STEP_SECONDS = 0.005
"""What a step of the engine takes on top: jobs last long enough for something to happen to them."""
FOR_EVER = 3600.0
NEW_PID_NAMESPACE, NEW_USER_NAMESPACE = 0x20000000, 0x10000000
SIGNAL_AT_DEATH_OF_PARENT = 1


@dataclass(frozen=True)
class Sabotaged:
    """The worker's command in a process that is not as it should be."""

    step_seconds: float = STEP_SECONDS
    clock: float = 0.0
    """Seconds that its clock is ahead."""
    name: str | None = None
    """Holds its leases under this name, whoever else does."""
    fatal: bool = True
    """Whether jobs whose ids ask for it bring the process down, or to a halt."""
    first_process: bool = False
    """Whether it is process 1, as in a container: a signal that it has no handler for does nothing."""

    def __call__(self, arguments: Sequence[str]) -> int:
        if self.first_process:
            _become_first_process()
        _shift_clock(self.clock)
        _slow_down(self.step_seconds)
        if self.name is not None:
            app.Service = partial(_renamed, app.Service, self.name)
        if self.fatal:
            _obey_ids()
        return run_worker(arguments)


def _renamed(make: Callable[..., Any], alias: str, *args: Any, report: WorkerReport, **parts: Any) -> Any:
    """What it writes into results stays its own."""
    return make(*args, report=report.model_copy(update={"name": alias}), **parts)


def _shift_clock(seconds: float) -> None:
    wall_clock, calendar = time.time, datetime.datetime

    class ShiftedCalendar(calendar):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return calendar.now(tz) + datetime.timedelta(seconds=seconds)

    if seconds:
        time.time = lambda: wall_clock() + seconds
        datetime.datetime = ShiftedCalendar


def _slow_down(seconds: float) -> None:
    step = Engine.step

    def slow_step(engine: Engine) -> Any:
        time.sleep(seconds)
        return step(engine)

    Engine.step = slow_step


def _obey_ids() -> None:
    _before(Admission, "prepare", lambda claimed, held: _die_if(held.id, KILLS_IN_PREPARATION))
    _before(Engine, "add", _mark_steps)
    _before(Queue, "finish", lambda worker, attempt, result: _freeze_if(result.id))


def _before(owner: type, method: str, happens: Callable[..., None]) -> None:
    original = getattr(owner, method)

    def patched(self: Any, *arguments: Any) -> Any:
        happens(*arguments)
        return original(self, *arguments)

    setattr(owner, method, patched)


def _mark_steps(request: Any) -> None:
    """From the step on in which such a request is in the engine, nothing is as it was."""
    if request.id.startswith(KILLS_IN_STEP):
        _before(Engine, "step", lambda: _die_if(request.id, KILLS_IN_STEP))
    if request.id.startswith(HANGS_IN_STEP):
        _before(Engine, "step", _hang)


def _hang() -> None:
    time.sleep(FOR_EVER)


def _die_if(job_id: str, fate: str) -> None:
    """As the kernel ends a process for the memory it takes."""
    if job_id.startswith(fate):
        os.kill(os.getpid(), signal.SIGKILL)


def _freeze_if(job_id: str) -> None:
    if job_id.startswith(FREEZES_BEFORE_FINISH):
        os.kill(os.getpid(), signal.SIGSTOP)


def _become_first_process() -> None:
    """Returns in a child that is process 1 of a namespace of its own; this process ends as the child does.

    Raises:
        PermissionError: the machine does not let us have one.
    """
    system = ctypes.CDLL(None, use_errno=True)
    privilege = 0 if os.geteuid() == 0 else NEW_USER_NAMESPACE
    if system.unshare(NEW_PID_NAMESPACE | privilege):
        number = ctypes.get_errno()
        raise PermissionError(number, os.strerror(number))
    child = os.fork()
    if child == 0:
        system.prctl(SIGNAL_AT_DEATH_OF_PARENT, signal.SIGKILL)
        return
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
