"""Connections to Redis, and what its refusals mean.

Every move is idempotent, so a command whose reply was lost may be sent again; redis-py does that
once. Nothing here waits longer than `SOCKET_TIMEOUT` for an answer, and no blocking read asks for
more than `MAX_BLOCK`, so that a dead connection is noticed and a live one is not mistaken for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
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


class _HearsCancellation(AbstractConnection):
    """A connection whose commands end when their task is cancelled, whatever the moment.

    redis-py sends through `asyncio.wait_for`, which on Python 3.11 swallows a cancellation that comes
    in the turn of the loop in which it ends (python/cpython#86296). The task would go on as if nobody
    had asked it to stop.
    """

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        task = asyncio.current_task()
        cancelled_before = task.cancelling() if task else 0
        await super().send_packed_command(command, check_health)
        if task and task.cancelling() > cancelled_before:
            # The command is on its way: its reply must not be taken for that of the next one.
            await self.disconnect(nowait=True)
            raise asyncio.CancelledError


class _TCPConnection(_HearsCancellation, Connection):
    pass


class _TLSConnection(_HearsCancellation, SSLConnection):
    pass


class _UnixConnection(_HearsCancellation, UnixDomainSocketConnection):
    pass


_CONNECTIONS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _TCPConnection,
    SSLConnection: _TLSConnection,
    UnixDomainSocketConnection: _UnixConnection,
}


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
    connection_class = _CONNECTIONS[options.get("connection_class", Connection)]
    # After the URL's own options: whatever it asks for, replies are parsed in this one shape.
    fixed: dict[str, Any] = {
        **options,
        "connection_class": connection_class,
        "protocol": 2,
        "decode_responses": False,
        "max_connections": max_connections,
        "timeout": SOCKET_TIMEOUT,
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "retry": Retry(NoBackoff(), 1),
    }
    if connection_class is not _UnixConnection:  # which knows no such option
        fixed["socket_keepalive"] = True
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
