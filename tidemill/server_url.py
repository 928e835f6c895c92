"""The URLs that say where Redis is.

    redis://[user:password@]host[:6379][/database]        rediss:// with TLS
    unix://[user:password@]/path/to/socket[?db=database]
    redis+sentinel://[user:password@]host[:26379][,host…]/service[/database]
    redis+cluster://[user:password@]host[:6379][,host…]

The last two with TLS: `rediss+sentinel://`, `rediss+cluster://`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import parse_url

from tidemill.errors import ConfigurationError
from tidemill.topology import Address


class Kind(StrEnum):
    """How many servers there are, and who knows which one is the primary."""

    SINGLE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


DEFAULT_PORTS = {Kind.SINGLE: 6379, Kind.SENTINEL: 26379, Kind.CLUSTER: 6379}


@dataclass(frozen=True)
class ServerURL:
    """What a URL says."""

    kind: Kind
    seeds: tuple[Address, ...]
    """Empty for a Unix socket."""
    service: str
    """The name by which the sentinels know the primary."""
    options: dict[str, Any] = field(repr=False)
    """redis-py's own options: credentials, database, TLS; `connection_class` unless it is plain TCP."""

    @property
    def names_host(self) -> bool:
        """If so, no part of a password that is not percent-encoded can have been taken for an option."""
        return "host" in self.options

    @classmethod
    def parse(cls, url: str) -> ServerURL:
        """Take a URL apart.

        Raises:
            ConfigurationError: it is none of these. The message has no part of it: a password may
                stand anywhere in a URL that is wrong.
        """
        with suppress(ValueError):
            return _parse(url)
        # Not from there: the parser's error quotes the URL, and would go along as the context.
        raise ConfigurationError(
            "not a Redis URL; expected redis://[user:password@]host[:port][/database], rediss://…, "
            "unix://…, redis+sentinel://[user:password@]host[:port][,host…]/service[/database] or "
            "redis+cluster://[user:password@]host[:port][,host…], with special characters in the "
            "password percent-encoded"
        )


def _parse(url: str) -> ServerURL:
    scheme, _, name = urlsplit(url).scheme.partition("+")
    kind = Kind(name)
    if kind is Kind.SINGLE:
        options = dict(parse_url(url))
        seeds = () if "path" in options else (_address(options, kind),)
        return ServerURL(kind, seeds, "", options)
    if scheme not in ("redis", "rediss"):
        raise ValueError("a Unix socket leads to one server")
    return _parse_many(kind, scheme, url)


def _parse_many(kind: Kind, scheme: str, url: str) -> ServerURL:
    """One ordinary URL is made for each host, and left to redis-py to understand."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    service, database = _path(kind, parts.path)
    each = [
        dict(parse_url(f"{scheme}://{user}{at}{host}/{database}?{parts.query}")) for host in hosts.split(",")
    ]
    if not all(options.get("host") for options in each):
        raise ValueError("a host is missing")
    if kind is Kind.CLUSTER and each[0].get("db"):
        raise ValueError("a cluster has one database")
    return ServerURL(kind, tuple(_address(options, kind) for options in each), service, each[0])


def _path(kind: Kind, path: str) -> tuple[str, int]:
    """Service and database."""
    names = path.removeprefix("/").split("/")
    service = names.pop(0) if kind is Kind.SENTINEL else ""
    database = int("".join(names) or "0") if len(names) < 2 else -1
    if database < 0 or (kind is Kind.SENTINEL and not service):
        raise ValueError("not a path of this kind")
    return service, database


def _address(options: dict[str, Any], kind: Kind) -> Address:
    return Address(options.get("host", "localhost"), options.get("port", DEFAULT_PORTS[kind]))
