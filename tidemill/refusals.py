"""What the refusals of Redis, and of the network, mean.

Commands that are no move of a job, and so are sent to Redis directly, fail like the moves do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.asyncio import Redis
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    ExecAbortError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from tidemill.connection import address_of
from tidemill.errors import QueueUnavailable
from tidemill.pool import Pool
from tidemill.topology import PrimaryUnknown

_OUTAGES = (
    *(ConnectionError, TimeoutError, ReadOnlyError, MasterDownError, ClusterDownError),
    *(AskError, MovedError, TryAgainError, ExecAbortError),
)

_DENIED = "does not permit this user what the queue needs"
_DENIED_IN_SCRIPT = ("ACL failure in script", "The user executing the script can't")
"""How Valkey, and Redis 7.0, begin to say that a script of ours does what the user may not."""
_KILLED = "Script killed by user"
"""What they both say somewhere if somebody has ended it with SCRIPT KILL."""

_REASONS: tuple[tuple[type[RedisError], str], ...] = (
    (AuthenticationError, "refuses the credentials"),
    (AuthorizationError, "refuses the credentials"),
    (NoPermissionError, _DENIED),
    (BusyLoadingError, "is loading its data"),
    (NoScriptError, "keeps losing its scripts"),
    (OutOfMemoryError, "is out of memory"),
    (ReadOnlyError, "is a read-only replica"),
    (MasterDownError, "has lost its primary"),
    (ClusterDownError, "belongs to a cluster that is down"),
    (MovedError, "does not hold this queue, another node of the cluster does (redis+cluster:// finds it)"),
    (AskError, "is handing this queue over to another node of the cluster"),
    (TryAgainError, "is handing this queue over to another node of the cluster"),
    (ExecAbortError, "has discarded a transaction"),
    (InvalidResponse, "does not speak as Redis does"),
    (PrimaryUnknown, "has no primary that could be found"),
    (TimeoutError, "does not answer"),
    (ConnectionError, "cannot be reached"),
)

_ELSEWHERE = ("NOREPLICAS", "UNBLOCKED")
"""Said by a primary whose replicas may have left it for another one, and to blocking reads by one that
has just become a replica itself."""

_REFUSALS = {
    "MISCONF": "cannot save its data",
    "NOREPLICAS": "has too few replicas to accept writes",
    "NOAUTH": "refuses the credentials",
    "WRONGPASS": "refuses the credentials",
    "BUSY": "is busy with somebody's script",
    "DENIED": "lets nobody in from here (protected mode)",
    "UNBLOCKED": "has become a replica",
}


def _is_outage(error: RedisError) -> bool:
    """Whether another server may be the right one by now, or a connection have gone dead."""
    return isinstance(error, _OUTAGES) or _first_word(error) in _ELSEWHERE


def unavailable(error: RedisError, redis: Redis) -> QueueUnavailable | None:
    """Say why Redis does not serve us; `None` if the error is not about that."""
    reason = _reason(error)
    if reason is None:
        return None
    return QueueUnavailable(f"Redis at {address_of(redis)} {reason}: {error}")


def is_out_of_memory(refusal: QueueUnavailable) -> bool:
    """Whether the server is there, and has no room."""
    return isinstance(refusal.__cause__, OutOfMemoryError)


def _reason(error: RedisError) -> str | None:
    if isinstance(error, ResponseError) and str(error).startswith(_DENIED_IN_SCRIPT):
        return _DENIED
    if isinstance(error, ResponseError) and _KILLED in str(error):
        return "was told to kill a script of ours"
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    return _REFUSALS.get(_first_word(error)) if isinstance(error, ResponseError) else None


@contextmanager
def refusals_explained(redis: Redis, *others: Redis) -> Iterator[None]:
    """Turn what Redis or the network says inside the block into `QueueUnavailable`.

    Errors that mean a fault of ours pass unchanged. After an outage none of the clients' connections
    is used again: the address may lead to another server by now, and they never will.
    """
    try:
        yield
    except RedisError as error:
        if _is_outage(error):
            for client in (redis, *others):
                _distrust(client)
        explained = unavailable(error, redis)
        if explained is None:
            raise
        raise explained from error


def _distrust(client: Redis) -> None:
    pool = client.connection_pool
    if isinstance(pool, Pool):
        pool.distrust()


def _first_word(error: RedisError) -> str:
    return str(error).partition(" ")[0]
