"""What Redis did not do, in the few words that a metric may have for it."""

from __future__ import annotations

from enum import StrEnum

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    TimeoutError,
)

from tidemill.errors import QueueUnavailable


class RedisFailure(StrEnum):
    """Why a call failed."""

    OUT_OF_MEMORY = "out_of_memory"
    LOADING = "loading"
    NOT_PRIMARY = "not_primary"
    """It is a replica, or it or its cluster has lost the primary."""
    REFUSED = "refused"
    """Wrong credentials, or a user that may not do this."""
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    OTHER = "other"
    """It cannot save, say, or is busy with somebody's script; the log has its own words."""


# The first that fits: the later ones are bases of the earlier.
_KINDS: tuple[tuple[type[Exception], RedisFailure], ...] = (
    (OutOfMemoryError, RedisFailure.OUT_OF_MEMORY),
    (BusyLoadingError, RedisFailure.LOADING),
    (ReadOnlyError, RedisFailure.NOT_PRIMARY),
    (MasterDownError, RedisFailure.NOT_PRIMARY),
    (ClusterDownError, RedisFailure.NOT_PRIMARY),
    (AuthenticationError, RedisFailure.REFUSED),
    (AuthorizationError, RedisFailure.REFUSED),
    (NoPermissionError, RedisFailure.REFUSED),
    (TimeoutError, RedisFailure.TIMEOUT),
    (ConnectionError, RedisFailure.UNREACHABLE),
)


def failure_of(error: QueueUnavailable) -> RedisFailure:
    """Name it by what the client library has raised for it."""
    cause = error.__cause__
    return next((failure for kind, failure in _KINDS if isinstance(cause, kind)), RedisFailure.OTHER)
