"""The proxy loses exactly what it was told to lose; the fault suite stands on that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tests.tidemill.proxy import Proxy, proxy_to
from tests.tidemill.resp import Messages, words_of
from tests.tidemill.servers import Server


def plain_client(proxy: Proxy) -> Redis:
    """A client that sends nothing twice, and soon gives up on a silent connection."""
    return Redis(port=proxy.port, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=0.3)


@pytest.fixture
async def proxy(valkey: Server) -> AsyncIterator[Proxy]:
    async with proxy_to(valkey.port) as made:
        yield made


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[Redis]:
    async with plain_client(proxy) as made:
        await made.ping()
        yield made
        await made.delete("count")


def test_messages_are_cut_whole_wherever_the_bytes_are_split() -> None:
    stream = (
        b"*2\r\n$4\r\nECHO\r\n$2\r\n\r\n\r\n+OK\r\n*2\r\n*1\r\n:1\r\n$-1\r\n*-1\r\n*0\r\n$0\r\n\r\n-ERR x\r\n"
    )
    whole = Messages().feed(stream)
    messages = Messages()

    assert [one for byte in stream for one in messages.feed(bytes([byte]))] == whole
    assert [len(message) for message in whole] == [22, 5, 17, 5, 4, 6, 8]
    assert words_of(whole[0]) == [b"ECHO", b"\r\n"]


@pytest.mark.parametrize(
    ("silent", "error"), [(False, redis.exceptions.ConnectionError), (True, redis.exceptions.TimeoutError)]
)
@pytest.mark.parametrize("lost", ["reply", "command"])
async def test_exactly_the_nth_is_lost(
    proxy: Proxy, client: Redis, lost: str, silent: bool, error: type[Exception]
) -> None:
    lose = proxy.lose_reply if lost == "reply" else proxy.lose_command
    happened = lose("incrby", "count", nth=2, silent=silent)

    assert await client.incr("count") == 1
    assert await client.incr("another") == 1
    assert not happened.is_set()
    with pytest.raises(error):
        await client.incr("count")

    assert happened.is_set()
    assert await client.incr("count") == (3 if lost == "reply" else 2)
    await client.delete("another")


async def test_of_a_pipeline_the_replies_before_arrive(proxy: Proxy, valkey: Server) -> None:
    proxy.lose_reply("INCR", "count", nth=2)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"*2\r\n$4\r\nINCR\r\n$5\r\ncount\r\n" * 3)

    assert await reader.read() == b":1\r\n"
    writer.close()
    with valkey.client() as direct:
        assert direct.getdel("count") == b"3"


async def test_held_replies_arrive_later_and_in_order(proxy: Proxy, client: Redis, valkey: Server) -> None:
    proxy.hold_replies()
    pipeline = client.pipeline(transaction=False)
    for _ in range(2):
        pipeline.incr("count")
    held = asyncio.create_task(pipeline.execute())
    with valkey.client() as direct:
        while direct.get("count") != b"2":
            await asyncio.sleep(0)
    proxy.mend()

    assert await held == [1, 2]


async def test_connections_are_broken_refused_and_served_again(proxy: Proxy, client: Redis) -> None:
    proxy.hang_up()
    with pytest.raises(redis.exceptions.ConnectionError):
        await client.ping()
    assert await client.ping()

    await proxy.refuse()
    with pytest.raises(redis.exceptions.ConnectionError):
        await client.ping()
    with pytest.raises(redis.exceptions.ConnectionError, match="Connect call failed"):
        await client.ping()
    await proxy.start()
    assert await client.ping()


async def test_what_was_mended_does_not_happen(proxy: Proxy, client: Redis) -> None:
    happened = proxy.lose_reply("PING")
    proxy.mend()

    assert await client.ping()
    assert not happened.is_set()
