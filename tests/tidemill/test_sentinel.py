"""Behind Sentinel: whoever is the primary is found, and work goes on by itself after a failover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.tidemill.factories import make_job
from tests.tidemill.server_sets import SERVICE, running_sentinel, running_sentinel_set
from tests.tidemill.servers import Server, free_port, redis_binary, running, valkey_binary
from tests.tidemill.traffic import assert_outlives, assert_recorded_once
from tidemill.client import Client
from tidemill.connection import address_of, connect
from tidemill.discovery import queue_names
from tidemill.errors import QueueUnavailable


@pytest.mark.parametrize(
    ("binary", "accident"),
    [(valkey_binary(), "killed"), (redis_binary(), "demoted")],
    ids=["killed", "demoted"],
)
async def test_work_goes_on_by_itself_after_a_failover(binary: str, accident: str) -> None:
    """redis-py#460, #435: clients of a demoted primary were told READONLY without end."""
    with running_sentinel_set(binary) as servers:
        first = servers.primary
        happen = first.kill if accident == "killed" else servers.fail_over
        await assert_outlives(servers.url, happen, lambda: servers.primary is not first, queue="q")
        assert_recorded_once(servers.primary, "q")


async def test_a_sentinel_may_have_a_password_of_its_own_or_the_servers() -> None:
    binary = valkey_binary()
    with running(binary, "--requirepass", "p@ss") as server:
        of_server = f"sentinel auth-pass {SERVICE} p@ss"
        with running_sentinel(binary, server, of_server, "requirepass other") as sentinel:
            url = f"redis+sentinel://:p%40ss@127.0.0.1:{sentinel.port}/{SERVICE}/2"
            async with connect(f"{url}?sentinel_password=other") as redis:
                assert await redis.ping()
                assert (await redis.client_info())["db"] == 2
            async with connect(url) as redis, Client(url, queue="q") as client:
                assert address_of(redis) == f"{SERVICE} (sentinels 127.0.0.1:{sentinel.port})"
                with pytest.raises(QueueUnavailable, match=f"no primary.*{sentinel.port}: .*password"):
                    await client.ping()
        for own in ("requirepass p@ss", ""):
            with running_sentinel(binary, server, of_server, own) as sentinel:
                url = f"redis+sentinel://:p%40ss@127.0.0.1:{sentinel.port}/{SERVICE}"
                async with connect(url) as redis:
                    assert await redis.ping()


async def test_a_server_that_is_no_primary_is_not_used() -> None:
    """A sentinel that was cut off names yesterday's primary."""
    with running(valkey_binary(), "--replicaof", "127.0.0.1", str(free_port())) as replica:
        async with sentinel_that_names(replica) as url, Client(url, queue="q") as client:
            with pytest.raises(QueueUnavailable, match=f"no primary.*:{replica.port} was named, and is none"):
                await client.depth()


@asynccontextmanager
async def sentinel_that_names(server: Server) -> AsyncIterator[str]:
    """Something that gives every question the same answer; yields its URL."""
    port = str(server.port)
    reply = f"*2\r\n$9\r\n127.0.0.1\r\n${len(port)}\r\n{port}\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            # What a client says of itself is refused, which redis-py does not mind.
            writer.write(reply if b"get-master" in data else b"-ERR no\r\n" * data.count(b"*"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as sentinel:
        yield f"redis+sentinel://127.0.0.1:{sentinel.sockets[0].getsockname()[1]}/{SERVICE}"


async def test_a_service_that_no_sentinel_knows_is_named() -> None:
    with running(valkey_binary()) as server, running_sentinel(valkey_binary(), server) as sentinel:
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/elsewhere"
        with pytest.raises(QueueUnavailable, match="no service of the name elsewhere"):
            await queue_names(url)
        async with Client(url.replace("elsewhere", SERVICE), queue="q") as client:
            await client.submit(make_job("a"))
        assert await queue_names(url.replace("elsewhere", SERVICE)) == ["q"]
