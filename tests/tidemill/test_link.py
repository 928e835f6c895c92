"""Blocking reads: bounded in connections and in time, however many there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from tests.tidemill.servers import Server
from tidemill.connection import MAX_BLOCK, connect
from tidemill.link import Link
from tidemill.moves import QueueSettings

CONNECTIONS = 3
READERS = 40


@asynccontextmanager
async def link_to(server: Server, prefix: str) -> AsyncIterator[Link]:
    async with connect(f"{server.url}?client_name={prefix}", max_connections=CONNECTIONS) as redis:
        link = Link(redis, prefix, QueueSettings(), time.monotonic)
        yield link
        await link.aclose()


async def connections(redis: Redis, name: str) -> int:
    return sum(one["name"] == name for one in await redis.client_list())


async def test_many_readers_share_few_connections_and_none_waits_longer(valkey: Server) -> None:
    """redis-py's own pool raised for the 101st reader of a stream."""
    async with link_to(valkey, "crowd") as link:
        began = time.monotonic()
        readers = [link.read("crowd", "0", 1, 0.3) for _ in range(READERS)]
        assert await asyncio.gather(*readers) == [[]] * READERS
        assert time.monotonic() - began < 0.3 * READERS / CONNECTIONS / 2, "they took turns in blocking"
        assert await connections(link.redis, "crowd") <= 2 * CONNECTIONS


async def test_commands_are_served_while_all_readers_block(valkey: Server) -> None:
    async with link_to(valkey, "busy") as link:
        readers = [asyncio.create_task(link.read("busy", "0", 1, MAX_BLOCK)) for _ in range(READERS)]
        await asyncio.wait(readers, timeout=0.1)

        async with asyncio.timeout(MAX_BLOCK):
            await asyncio.gather(*(link.ping() for _ in range(50)))
            assert not any(reader.done() for reader in readers)
            await link.redis.xadd("busy", {"a": "b"}, id="1-1")
            blocked = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
            assert blocked[0]

        assert [entry for reader in readers for entry, _ in await reader] == ["1-1"] * READERS
        await link.redis.delete("busy")


async def test_a_reader_that_is_cancelled_gives_its_turn_back(valkey: Server) -> None:
    async with link_to(valkey, "turns") as link:
        for _ in range(3 * CONNECTIONS):
            reader = asyncio.create_task(link.read("turns", "0", 1, MAX_BLOCK))
            await asyncio.wait([reader], timeout=0.01)
            reader.cancel()
            await asyncio.wait([reader])

        assert await link.read("turns", "0", 1, 0.05) == []
        assert not link._turns.locked()
