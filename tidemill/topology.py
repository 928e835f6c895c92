"""Where the primary is, on servers of which there are several: behind Sentinel, or in a Cluster.

Nothing is remembered: each connection asks anew when it connects, so that it finds whoever is the
primary by then. A queue lives on one node of a cluster, since all its keys share one hash slot.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ConnectionError, RedisError

T = TypeVar("T")


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PrimaryUnknown(ConnectionError):
    """Nobody who was asked knows a primary, or the node found is none (yet)."""


class Topology(Protocol):
    """Servers of which one at a time is the right one."""

    async def primary(self) -> Address:
        """Where the queue is at present.

        Raises:
            PrimaryUnknown: no seed could tell.
        """
        ...


Opener = Callable[[Address], Redis]


@dataclass(frozen=True)
class Seeds:
    """The nodes that the URL names."""

    addresses: tuple[Address, ...]
    openers: Sequence[Opener] = field(repr=False)
    """How to log in; the next one is tried where the one before is refused."""

    def __str__(self) -> str:
        return ", ".join(map(str, self.addresses))

    async def ask(self, question: Callable[[Redis], Awaitable[T]]) -> T:
        """The answer of the first that has one, in random order: a seed that errs is not everybody's first.

        Raises:
            PrimaryUnknown: none has; with what each of them said.
        """
        said = []
        for address in random.sample(self.addresses, len(self.addresses)):
            try:
                return await self._ask_one(address, question)
            except RedisError as error:
                said.append(f"{address}: {error}")
        raise PrimaryUnknown("; ".join(said))

    async def _ask_one(self, address: Address, question: Callable[[Redis], Awaitable[T]]) -> T:
        *others, last = self.openers
        for opener in others:
            try:
                async with _opened(opener, address) as node:
                    return await question(node)
            except AuthenticationError:
                continue
        async with _opened(last, address) as node:
            return await question(node)


@asynccontextmanager
async def _opened(opener: Opener, address: Address) -> AsyncIterator[Redis]:
    """A connection to a node, closed at the end even if its user is cancelled just then.

    redis-py closes in tasks of their own, which a cancellation keeps from beginning.
    """
    node = opener(address)
    try:
        yield node
    finally:
        await asyncio.shield(node.aclose())


@dataclass(frozen=True)
class SentinelService:
    """A primary and its replicas, watched by sentinels."""

    seeds: Seeds
    service: str

    def __str__(self) -> str:
        return f"{self.service} (sentinels {self.seeds})"

    async def primary(self) -> Address:
        """Whom the sentinels have made primary."""
        return await self.seeds.ask(self._ask_sentinel)

    async def _ask_sentinel(self, sentinel: Redis) -> Address:
        found = await _raw(sentinel, "SENTINEL", "get-master-addr-by-name", self.service)
        if found is None:
            raise PrimaryUnknown(f"no service of the name {self.service}")
        host, port = found
        return Address(host.decode(), int(port))


@dataclass(frozen=True)
class ClusterSlot:
    """The node of a cluster that holds one hash slot."""

    seeds: Seeds
    slot: int | None
    """`None`: whichever node, for what concerns no queue."""

    def __str__(self) -> str:
        return f"cluster {self.seeds}"

    async def primary(self) -> Address:
        """The slot's node."""
        return await self.seeds.ask(self._ask_node)

    async def primaries(self) -> list[Address]:
        """All nodes that hold slots."""
        ranges = await self.seeds.ask(_slot_ranges)
        return sorted({address for _, address in ranges})

    async def _ask_node(self, node: Redis) -> Address:
        for slots, address in await _slot_ranges(node):
            if self.slot is None or self.slot in slots:
                return address
        raise PrimaryUnknown("no node holds the queue's slot")


async def _slot_ranges(node: Redis) -> list[tuple[range, Address]]:
    """Which primary holds which slots, as this node knows it."""
    ranges = await _raw(node, "CLUSTER", "SLOTS")
    # A node that does not know by what name it is reached leaves it out: by the one used just now.
    own_host: str = node.connection_pool.connection_kwargs["host"]
    return [
        (range(first, last + 1), Address(host.decode() if host else own_host, port))
        for first, last, (host, port, *_), *_ in ranges
    ]


async def _raw(node: Redis, *command: str) -> Any:
    """The reply as the server gave it."""
    return await node.execute_command(*command)  # type: ignore[no-untyped-call]  # in redis-py
