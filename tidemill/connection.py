"""Connections to Redis.

Every move is idempotent, so a command whose reply was lost may be sent again; redis-py does that
once. Nothing here waits longer than `SOCKET_TIMEOUT` for an answer, and no blocking read asks for
more than `MAX_BLOCK`, so that a dead connection is noticed and a live one is not mistaken for it.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterable
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError, TimeoutError

from tidemill.errors import ConfigurationError
from tidemill.keys import QueueKeys
from tidemill.pool import Pool
from tidemill.server_url import Kind, ServerURL
from tidemill.topology import Address, ClusterSlot, Opener, PrimaryUnknown, Seeds, SentinelService, Topology

MAX_BLOCK = 2.0
"""Seconds that a blocking read may wait on the server."""

SOCKET_TIMEOUT = 10.0
"""Seconds until a silent connection counts as dead; above `MAX_BLOCK`, below a third of a lease."""

CONNECT_TIMEOUT = 5.0
"""Seconds to establish a connection; as long again to find out where to, if there are several servers."""

SEED_TIMEOUT = 2.0
"""Seconds for a seed to answer: there are others to ask, and more than one must have a chance."""

MAX_CONNECTIONS = 32
"""Commands in flight at once; more wait their turn instead of opening sockets."""


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


class _FindsPrimary(Connection):
    """A connection that asks for the primary each time it connects, and makes sure that it is one."""

    def __init__(self, *, topology: Topology, **options: Any) -> None:
        super().__init__(**options)
        self._topology = topology

    async def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        if not self.is_connected:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    self.host, self.port = await self._topology.primary()
            except builtins.TimeoutError:
                raise TimeoutError("nobody says in time where the primary is") from None
        await super().connect_check_health(check_health, retry_socket_connect)

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health)
        await self.send_command("ROLE", check_health=False)
        if (await self.read_response())[0] != b"master":
            raise PrimaryUnknown(f"{self.host}:{self.port} was named, and is none")


class _PrimaryTCPConnection(_FindsPrimary, _TCPConnection):
    pass


class _PrimaryTLSConnection(_FindsPrimary, _TLSConnection):
    pass


_CONNECTIONS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _TCPConnection,
    SSLConnection: _TLSConnection,
    UnixDomainSocketConnection: _UnixConnection,
}
_PRIMARY_CONNECTIONS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    _TCPConnection: _PrimaryTCPConnection,
    _TLSConnection: _PrimaryTLSConnection,
}


def connect(url: str, *, queue: str | None = None, max_connections: int = MAX_CONNECTIONS) -> Redis:
    """Make a client; nothing is sent yet. Close it with `aclose`.

    Args:
        url: as `tidemill.server_url` describes them; see docs/connections.md.
        queue: whose commands these are; in a cluster it decides which node is connected to.
        max_connections: commands in flight at once; more wait their turn.

    Raises:
        ConfigurationError: the URL is none of these, or has options that cannot be.
    """
    parsed = ServerURL.parse(url)
    options = _fixed_options(parsed.options)
    _check_options(parsed, options)
    if topology := _topology(parsed, queue):
        options["connection_class"] = _PRIMARY_CONNECTIONS[options["connection_class"]]
        options["topology"] = topology
    return Redis.from_pool(Pool(max_connections=max_connections, timeout=SOCKET_TIMEOUT, **options))


async def each_primary(redis: Redis) -> list[Redis]:
    """Make a client for each primary of the cluster that this one connects to; otherwise it is the only one.

    Raises:
        RedisError: no node of the cluster could be asked.
    """
    pool = redis.connection_pool
    options: dict[str, Any] = dict(pool.connection_kwargs)
    topology = options.pop("topology", None)
    if not isinstance(topology, ClusterSlot):
        return [redis]
    tls = issubclass(pool.connection_class, SSLConnection)
    open_node = _opener({**options, "connection_class": _TLSConnection if tls else _TCPConnection})
    return [open_node(address) for address in await topology.primaries()]


def blocking_twin(redis: Redis) -> Redis:
    """Make a client to the same server for blocking reads, so that they starve no command."""
    pool = redis.connection_pool
    options: dict[str, Any] = dict(pool.connection_kwargs)
    return Redis.from_pool(
        Pool(
            connection_class=pool.connection_class,
            max_connections=pool.max_connections,
            timeout=SOCKET_TIMEOUT,
            **options,
        )
    )


def address_of(redis: Redis) -> str:
    """Where a client connects to, without credentials."""
    options = redis.connection_pool.connection_kwargs
    if "topology" in options:
        return str(options["topology"])
    if "path" in options:
        return str(options["path"])
    return str(Address(options.get("host", "localhost"), options.get("port", 6379)))


def _fixed_options(given: dict[str, Any]) -> dict[str, Any]:
    """The URL's own options and, after them, what no URL may change: replies have one shape."""
    connection_class = _CONNECTIONS[given.get("connection_class", Connection)]
    options = {
        **given,
        "connection_class": connection_class,
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "retry": Retry(NoBackoff(), 1),
    }
    if connection_class is not _UnixConnection:  # which knows no such option
        options["socket_keepalive"] = True
    for name in ("sentinel_username", "sentinel_password"):
        options.pop(name, None)
    return options


def _check_options(url: ServerURL, options: dict[str, Any]) -> None:
    """Make a connection, which is not opened, to hear now what would be wrong with each."""
    arguments = {name: value for name, value in options.items() if name != "connection_class"}
    try:
        trial = options["connection_class"](**arguments)
        if isinstance(trial, SSLConnection):
            trial.ssl_context.get()
        return
    except (TypeError, ValueError, OSError, RedisError) as error:
        reason = str(error) if url.may_tell_options else "one has a value that does not fit"
    # Not from there: what is not told must not go along as the context either.
    raise ConfigurationError(f"options of the Redis URL: {reason}")


def _topology(url: ServerURL, queue: str | None) -> Topology | None:
    if url.kind is Kind.SINGLE:
        return None
    seed_options = {
        **_fixed_options(url.options),
        "socket_timeout": SEED_TIMEOUT,
        "socket_connect_timeout": SEED_TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
    }
    if url.kind is Kind.SENTINEL:
        return SentinelService(Seeds(url.seeds, _sentinel_openers(url, seed_options)), url.service)
    slot = None if queue is None else key_slot(QueueKeys(queue).prefix.encode())
    return ClusterSlot(Seeds(url.seeds, [_opener(seed_options)]), slot)


def _sentinel_openers(url: ServerURL, options: dict[str, Any]) -> list[Opener]:
    """Sentinels have users of their own: those given for them; else none or, if they insist, the server's."""
    options = {**options, "db": 0}
    bare = {**options, "username": None, "password": None}
    own = {name: url.options.get(f"sentinel_{name}") for name in ("username", "password")}
    if own["password"]:
        return [_opener({**bare, **own})]
    return [_opener(bare), _opener(options)]


def _opener(options: dict[str, Any]) -> Opener:
    def open_node(address: Address) -> Redis:
        return Redis.from_pool(
            ConnectionPool(max_connections=1, **{**options, "host": address.host, "port": address.port})
        )

    return open_node
