"""Connections to Redis, and what its refusals mean.

Every move is idempotent, so a command whose reply was lost may be sent again; redis-py does that
once. Nothing here waits longer than `SOCKET_TIMEOUT` for an answer, and no blocking read asks for
more than `MAX_BLOCK`, so that a dead connection is noticed and a live one is not mistaken for it.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
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
    RedisError,
    ResponseError,
    TimeoutError,
)

from tidemill.errors import ConfigurationError, QueueUnavailable

MAX_BLOCK = 2.0
"""Seconds that a blocking read may wait on the server."""

SOCKET_TIMEOUT = 10.0
"""Seconds until a silent connection counts as dead; above `MAX_BLOCK`, below a third of a lease."""

CONNECT_TIMEOUT = 5.0
MAX_CONNECTIONS = 32
"""Commands in flight at once; more wait their turn instead of opening sockets."""

OUTAGES = (ConnectionError, TimeoutError, ReadOnlyError, MasterDownError, ClusterDownError)
"""Errors after which the server may have been away for everybody."""


def connect(url: str, *, max_connections: int = MAX_CONNECTIONS) -> Redis:
    """Make a client; nothing is sent yet. Close it with `aclose`.

    Raises:
        ConfigurationError: the URL is none that Redis clients know.
    """
    try:
        options = parse_url(url)
    except ValueError:
        # Neither the URL nor what the parser says of it: a password may stand anywhere in it.
        raise ConfigurationError(
            "not a Redis URL; expected redis://[user:password@]host[:port][/database], "
            "rediss://… or unix://…, with special characters in the password percent-encoded"
        ) from None
    # After the URL's own options: whatever it asks for, replies are parsed in this one shape.
    fixed: dict[str, Any] = {
        **options,
        "protocol": 2,
        "decode_responses": False,
        "max_connections": max_connections,
        "timeout": SOCKET_TIMEOUT,
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 1),
    }
    return Redis.from_pool(BlockingConnectionPool(**fixed))


def blocking_twin(redis: Redis) -> Redis:
    """Make a client to the same server for blocking reads, so that they starve no command."""
    pool = redis.connection_pool
    kwargs: dict[str, Any] = dict(pool.connection_kwargs)
    return Redis.from_pool(ConnectionPool(connection_class=pool.connection_class, **kwargs))


def address_of(redis: Redis) -> str:
    """Where a client connects to, without credentials."""
    kwargs = redis.connection_pool.connection_kwargs
    if "path" in kwargs:
        return str(kwargs["path"])
    return f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}"


_REASONS: tuple[tuple[type[RedisError], str], ...] = (
    (AuthenticationError, "refuses the credentials"),
    (AuthorizationError, "refuses the credentials"),
    (NoPermissionError, "does not permit this user what the queue needs"),
    (BusyLoadingError, "is loading its data"),
    (OutOfMemoryError, "is out of memory"),
    (ReadOnlyError, "is a read-only replica"),
    (MasterDownError, "has lost its primary"),
    (ClusterDownError, "belongs to a cluster that is down"),
    (TimeoutError, "does not answer"),
    (ConnectionError, "cannot be reached"),
)

_REFUSALS = {
    "MISCONF": "cannot save its data",
    "NOREPLICAS": "has too few replicas to accept writes",
    "NOAUTH": "refuses the credentials",
    "WRONGPASS": "refuses the credentials",
    "BUSY": "is busy with somebody's script",
    "NOSCRIPT": "keeps losing its scripts",
}


def unavailable(error: RedisError, redis: Redis) -> QueueUnavailable | None:
    """Say why Redis does not serve us; `None` if the error is not about that."""
    reason = next((text for kind, text in _REASONS if isinstance(error, kind)), None)
    if reason is None and isinstance(error, ResponseError):
        words = str(error).split()
        reason = _REFUSALS.get(words[0]) if words else None
    if reason is None:
        return None
    return QueueUnavailable(f"Redis at {address_of(redis)} {reason}: {error}")
