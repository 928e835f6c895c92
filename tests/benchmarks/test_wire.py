"""A wire carries, breaks and is mended."""

from __future__ import annotations

import pytest
from ports import free_port
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from wire import Wire, wire_to

from tests.tidemill.servers import Server


def client_on(wire: Wire) -> Redis:
    return Redis.from_url(wire.url, retry=Retry(NoBackoff(), 0))


async def test_what_is_sent_arrives_and_comes_back(valkey: Server) -> None:
    payload = "x" * 1_000_000
    async with wire_to(valkey.port) as wire, client_on(wire) as client:
        assert await client.echo(payload) == payload.encode()


async def test_a_cut_wire_breaks_what_is_open_and_refuses_what_is_new_until_it_is_mended(
    valkey: Server,
) -> None:
    async with wire_to(valkey.port) as wire, client_on(wire) as client:
        await client.ping()
        wire.cut()
        for _ in range(2):  # the connection there was, then a new one
            with pytest.raises(RedisError):
                await client.ping()
        wire.mend()
        assert await client.ping()


async def test_a_server_that_is_away_refuses_and_the_wire_goes_on() -> None:
    async with wire_to(free_port()) as wire, client_on(wire) as client:
        for _ in range(2):
            with pytest.raises(RedisError):
                await client.ping()


async def test_a_closed_wire_leaves_no_connection(valkey: Server) -> None:
    async with wire_to(valkey.port) as wire:
        client = client_on(wire)
        await client.ping()
    with pytest.raises(RedisError):
        await client.ping()
    await client.aclose()
