"""What the exit status of the `tidemill` command means."""

from __future__ import annotations

from enum import IntEnum

from tidemill.errors import (
    ConfigurationError,
    InvalidJob,
    JobConflict,
    JobUnknown,
    QueueFull,
    QueueUnavailable,
    TidemillError,
)


class ExitCode(IntEnum):
    """Part of the interface: never renumbered."""

    OK = 0
    FAILED = 1
    """A job failed, was cancelled or expired; or the command itself could not do its work."""
    USAGE = 2
    """Wrong options or settings, or an invalid job."""
    UNKNOWN_JOB = 3
    UNAVAILABLE = 4
    """Redis cannot be reached, refuses the password, or is not ready."""
    TIMEOUT = 5
    """There is no result yet."""
    QUEUE_FULL = 6
    STALLED = 7
    """A worker whose engine made no progress."""


EPILOG = (
    "Exit status: 0 done; 1 a job failed, was cancelled or expired; 2 wrong usage or an invalid job; "
    "3 unknown job; 4 the queue is unavailable; 5 no result in time; 6 the queue is full; "
    "7 the worker's engine stalled."
)

_BY_ERROR: tuple[tuple[type[Exception], ExitCode], ...] = (
    (InvalidJob, ExitCode.USAGE),
    (JobConflict, ExitCode.USAGE),
    (ConfigurationError, ExitCode.USAGE),
    (JobUnknown, ExitCode.UNKNOWN_JOB),
    (QueueUnavailable, ExitCode.UNAVAILABLE),
    (TimeoutError, ExitCode.TIMEOUT),
    (QueueFull, ExitCode.QUEUE_FULL),
)


def exit_code(error: TidemillError | TimeoutError) -> ExitCode:
    """The status with which a command ends that met `error`."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.FAILED)
