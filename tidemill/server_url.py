"""The URLs that say where Redis is.

    redis://[user:password@]host[:6379][/database]        rediss:// with TLS
    unix://[user:password@]/path/to/socket[?db=database]
    redis+sentinel://[user:password@]host[:26379][,host…]/service[/database]
    redis+cluster://[user:password@]host[:6379][,host…]

The last two with TLS: `rediss+sentinel://`, `rediss+cluster://`. Options after a `?` are those below.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from redis.asyncio.connection import parse_url

from tidemill.errors import ConfigurationError
from tidemill.topology import Address


class Kind(StrEnum):
    """How many servers there are, and who knows which one is the primary."""

    SINGLE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


DEFAULT_PORTS = {Kind.SINGLE: 6379, Kind.SENTINEL: 26379, Kind.CLUSTER: 6379}

OPTIONS = frozenset({"client_name", "db", "password", "username"})
SENTINEL_OPTIONS = frozenset({"sentinel_password", "sentinel_username"})
TLS_OPTIONS = frozenset(
    {
        "ssl_ca_certs",
        "ssl_ca_data",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_ciphers",
        "ssl_keyfile",
        "ssl_min_version",
        "ssl_password",
    }
)
PASSWORDS = frozenset({"password", "sentinel_password", "ssl_password"})

Where = tuple[tuple[Address, ...], str, dict[str, Any]]
"""Seeds, service and options."""


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
    may_tell_options: bool
    """False if the end of a password that is not percent-encoded can have been taken for one of them."""

    @classmethod
    def parse(cls, url: str) -> ServerURL:
        """Take a URL apart.

        Raises:
            ConfigurationError: it is none of these, or has an option that is not known here. The
                message has nothing of it but the name of such an option: a password may stand
                anywhere in a URL that is wrong.
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
    parts = urlsplit(url)
    if "@" in parts.path + parts.query or "#" in url:
        raise ValueError("the password has a character that ends the part of a URL where it belongs")
    scheme, _, name = parts.scheme.partition("+")
    kind = Kind(name)
    where = _socket(kind, parts) if scheme == "unix" else _servers(kind, scheme, parts)
    return ServerURL(kind, *where, may_tell_options=_check_names(parts.query, scheme, kind))


def _socket(kind: Kind, parts: SplitResult) -> Where:
    if kind is not Kind.SINGLE or parts.hostname or not parts.path:
        raise ValueError("a Unix socket is a path, and leads to one server")
    return (), "", dict(parse_url(parts.geturl()))


def _servers(kind: Kind, scheme: str, parts: SplitResult) -> Where:
    """One ordinary URL is made for each host, for redis-py to understand."""
    user, at, hosts = parts.netloc.rpartition("@")
    each: list[dict[str, Any]] = [
        dict(parse_url(f"{scheme}://{user}{at}{host}?{parts.query}")) for host in hosts.split(",")
    ]
    if not all(options.get("host") for options in each):
        raise ValueError("a host is missing")
    if kind is Kind.SINGLE and len(each) > 1:
        raise ValueError("several hosts, and nobody to say which one is the primary")
    service, database = _path(kind, parts.path)
    options = each[0]
    if database is not None and options.setdefault("db", database) != database:
        raise ValueError("two databases")
    if options.get("db") and kind is Kind.CLUSTER:
        raise ValueError("a cluster has one database")
    seeds = tuple(Address(one["host"], one.get("port", DEFAULT_PORTS[kind])) for one in each)
    return seeds, service, options


def _path(kind: Kind, path: str) -> tuple[str, int | None]:
    """Service and database."""
    names = path.removeprefix("/").split("/")
    service = names.pop(0) if kind is Kind.SENTINEL else ""
    database = "/".join(names)
    if not re.fullmatch("[0-9]*", database) or (kind is Kind.SENTINEL and not service):
        raise ValueError("not a path of this kind")
    return service, int(database) if database else None


def _check_names(query: str, scheme: str, kind: Kind) -> bool:
    """Refuse options that would go unheard or be misunderstood; returns `may_tell_options`."""
    names = [name for name, _ in parse_qsl(query, keep_blank_values=True)]
    known = OPTIONS.union(
        TLS_OPTIONS if scheme == "rediss" else (), SENTINEL_OPTIONS if kind is Kind.SENTINEL else ()
    )
    may_tell = PASSWORDS.isdisjoint(names)
    for name in names:
        if name not in known:
            which = repr(name) if may_tell or name in PASSWORDS else "one"
            raise ConfigurationError(
                f"options of the Redis URL: {which} is not known here; known are {', '.join(sorted(known))}"
            )
    return may_tell
