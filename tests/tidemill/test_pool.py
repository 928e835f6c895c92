"""Connections are shared, in turn: nobody is refused, and nobody waits beside a free one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import TimeoutError

from tests.tidemill.servers import Server
from tidemill.connection import connect
from tidemill.pool import Pool


@pytest.fixture
async def redis(valkey: Server) -> AsyncIterator[Redis]:
    async with connect(valkey.url, max_connections=5) as made:
        yield made


def pool_of(redis: Redis) -> Pool:
    pool = redis.connection_pool
    assert isinstance(pool, Pool)
    return pool


async def ping(redis: Redis) -> bool:
    return await redis.ping()


async def connections_of(redis: Redis) -> list[int]:
    """What the server sees of a client that was named."""
    return [int(one["id"]) for one in await redis.client_list() if one["name"] == "ours"]


async def test_more_commands_than_connections_wait_their_turn(valkey: Server) -> None:
    """redis-py#2517: 45 of 50 pings raised."""
    async with connect(f"{valkey.url}?client_name=ours", max_connections=5) as redis:
        assert await asyncio.gather(*(redis.ping() for _ in range(50))) == [True] * 50
        assert 1 <= len(await connections_of(redis)) <= 5


async def test_a_turn_of_one_who_is_cancelled_goes_to_the_next(valkey: Server) -> None:
    async with connect(valkey.url, max_connections=1) as redis:
        pool = pool_of(redis)
        held = await pool.get_connection()
        first = asyncio.create_task(ping(redis))
        second = asyncio.create_task(ping(redis))
        await asyncio.sleep(0.01)
        releasing = asyncio.create_task(pool.release(held))
        while not (releasing.done() or first.done()):
            await asyncio.sleep(0)
        first.cancel()

        async with asyncio.timeout(5):
            assert await second


@pytest.mark.parametrize("turns", range(12))
async def test_no_moment_of_a_cancellation_leaves_a_connection_taken(redis: Redis, turns: int) -> None:
    for _ in range(5):
        pings = [asyncio.create_task(ping(redis)) for _ in range(20)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for one in pings[::2]:
            one.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*pings, return_exceptions=True)

    async with asyncio.timeout(5):
        taken = [await pool_of(redis).get_connection() for _ in range(5)]
    for connection in taken:
        await pool_of(redis).release(connection)


async def test_one_who_waits_too_long_is_told_why(valkey: Server) -> None:
    pool = Pool(max_connections=1, timeout=0.02, host="127.0.0.1", port=valkey.port)
    held = await pool.get_connection()

    with pytest.raises(TimeoutError, match=r"all 1 connections have been busy for 0\.02 s"):
        await pool.get_connection()

    await pool.release(held)
    await pool.release(await pool.get_connection())
    await pool.aclose()


async def test_what_is_distrusted_is_not_used_again(valkey: Server) -> None:
    """Neither what was idle then, nor what was in use."""
    async with connect(valkey.url, max_connections=2) as redis:
        held = await pool_of(redis).get_connection()
        await held.send_command("CLIENT", "ID")
        before = {int(await held.read_response()), await redis.client_id()}
        assert len(before) == 2

        pool_of(redis).distrust()
        afterwards = {await redis.client_id()}
        await pool_of(redis).release(held)
        afterwards.update(await asyncio.gather(redis.client_id(), redis.client_id()))

        assert afterwards.isdisjoint(before)
        assert len(afterwards) == 2, "and what came after stays"
