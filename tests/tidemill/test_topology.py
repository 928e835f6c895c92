"""Asking the nodes that a URL names."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Connection, ConnectionPool, Redis

from tests.tidemill.servers import Server
from tidemill.topology import Address, Seeds


@pytest.mark.parametrize("openers", [1, 2], ids=["first", "last"])
async def test_no_connection_is_left_by_one_who_is_cancelled_as_it_closes(
    valkey: Server, openers: int
) -> None:
    made: list[Connection] = []

    def open_node(address: Address) -> Redis:
        return Redis.from_pool(ConnectionPool(host=address.host, port=address.port, max_connections=1))

    async def ask_and_be_cancelled(node: Redis) -> None:
        await node.ping()
        made.extend(node.connection_pool._available_connections)
        asker.cancel()

    seeds = Seeds((Address("127.0.0.1", valkey.port),), [open_node] * openers)
    asker = asyncio.create_task(seeds.ask(ask_and_be_cancelled))
    with pytest.raises(asyncio.CancelledError):
        await asker
    (connection,) = made
    async with asyncio.timeout(10):
        while connection.is_connected:
            await asyncio.sleep(0)
