"""Every way Tidemill says no.

TidemillError
├── InvalidJob          the job itself is wrong; names the field and the limit
├── JobConflict         this id was already submitted with other content
├── JobUnknown          no such job here, or its result has expired
├── JobFailed           raised by `Result.raise_for_status`; carries the result
├── QueueFull           the queue or the tenant is at its depth limit
├── QueueUnavailable    Redis cannot be reached, refuses us, or is loading
├── LeaseLost           this worker no longer holds the job
├── ConfigurationError  a setting is wrong; the process does not start
└── ModelUnsupported    this model cannot be served, and why

A job that was accepted and then failed does not raise: it is answered with a `Result` whose
`error` carries one of the `ErrorCode` values.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.jobs import Result


class ErrorCode(StrEnum):
    """Why an accepted job was answered with an error. Part of the wire format: never renamed."""

    INVALID_REQUEST = "invalid_request"
    """A field holds a value that this model or worker cannot honour."""
    UNDECODABLE = "undecodable"
    """The payload in the queue is not a job of any version we know."""
    MODEL_MISMATCH = "model_mismatch"
    """The job names a model that this queue does not serve."""
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    """Prompt and requested tokens do not fit the model's context."""
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"
    """The job fits the context but could never fit the worker's KV cache."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """The job's deadline passed before it finished."""
    CANCELLED = "cancelled"
    """Somebody cancelled the job."""
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    """Every attempt ended with its worker lost; the job was moved to the dead letters."""
    INTERNAL = "internal"
    """The engine failed on this job; the message says how."""


class TidemillError(Exception):
    """Base of everything Tidemill raises on purpose."""


class InvalidJob(TidemillError):
    """The job itself is wrong: `field` says where, `limit` (if any) what would have been right."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        limit: int | float | str | None = None,
        code: ErrorCode = ErrorCode.INVALID_REQUEST,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.limit = limit
        self.code = code


class JobConflict(TidemillError):
    """An id was submitted again with other content; one id stands for one piece of work."""


class JobUnknown(TidemillError):
    """No such job in this queue: never submitted, expired, or lost with the server's data."""


class JobFailed(TidemillError):
    """The job was answered, but not with a generation; `result.error` says why."""

    def __init__(self, result: Result) -> None:
        reason = result.error.message if result.error else result.status.value
        super().__init__(f"job {result.id}: {reason}")
        self.result = result


class QueueFull(TidemillError):
    """The queue, or this tenant's share of it, is at its depth limit. Try again later."""

    def __init__(self, message: str, *, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class QueueUnavailable(TidemillError):
    """Redis cannot be reached, refuses the password, or is not ready."""


class LeaseLost(TidemillError):
    """Another worker holds this job now, or nobody does; whatever was computed is void."""


class ConfigurationError(TidemillError):
    """A setting is wrong. The message names the setting and the value it would accept."""


class ModelUnsupported(TidemillError):
    """A model that cannot be served correctly here; the message is the one-line reason."""
