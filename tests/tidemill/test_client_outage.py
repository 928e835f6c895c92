"""Redis that is away, refuses us, or is not ready: a reason a user understands, and no secret."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.tidemill.echo_worker import open_queue, work
from tests.tidemill.factories import make_job
from tests.tidemill.servers import free_port, running, valkey_binary
from tidemill.client import Client, ClientSettings
from tidemill.discovery import queue_names
from tidemill.errors import ConfigurationError, QueueUnavailable
from tidemill.jobs import JobId
from tidemill.moves import QueueSettings

SECRET = "hunter2"

CALLS: dict[str, Callable[[Client], Awaitable[object]]] = {
    "ping": lambda client: client.ping(),
    "submit": lambda client: client.submit(make_job("a")),
    "submit_many": lambda client: anext(client.submit_many([make_job("a")])),
    "result": lambda client: client.result(JobId("a")),
    "stream": lambda client: anext(client.stream(JobId("a"))),
    "status": lambda client: client.status(JobId("a")),
    "cancel": lambda client: client.cancel(JobId("a")),
    "depth": lambda client: client.depth(),
    "model_card": lambda client: client.model_card(),
    "as_completed": lambda client: anext(client.as_completed([JobId("a")])),
}


@asynccontextmanager
async def server_that_says(reply: bytes) -> AsyncIterator[str]:
    """Something that answers every command so; yields its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(reply * data.count(b"*"))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"redis://:{SECRET}@127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


async def refusal(url: str, call: Callable[[Client], Awaitable[object]]) -> str:
    """What a user is told."""
    async with Client(url, queue="q", settings=ClientSettings(patience=0.0)) as client:
        with pytest.raises(QueueUnavailable) as caught:
            await call(client)
    return str(caught.value)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_every_call_says_that_redis_is_down(call: Callable[[Client], Awaitable[object]]) -> None:
    port = free_port()
    message = await refusal(f"redis://user:{SECRET}@127.0.0.1:{port}/0", call)
    assert f"127.0.0.1:{port} cannot be reached" in message
    assert SECRET not in message


async def test_passwords_missing_and_wrong_are_told_apart_from_outages() -> None:
    with running(valkey_binary(), "--requirepass", SECRET) as server:
        for credentials in ("", ":wrong-guess@", "user:wrong-guess@"):
            url = f"redis://{credentials}127.0.0.1:{server.port}/0"
            for name in ("ping", "submit", "as_completed"):
                message = await refusal(url, CALLS[name])
                assert "refuses the credentials" in message
                assert "wrong-guess" not in message
        async with Client(f"redis://:{SECRET}@127.0.0.1:{server.port}/0", queue="q") as client:
            await client.ping()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "loading"),
        (b"-READONLY You can't write against a read only replica.\r\n", "read-only replica"),
        (b"-NOSCRIPT No matching script.\r\n", "keeps losing its scripts"),
        (b"-MISCONF Redis is configured to save RDB snapshots\r\n", "cannot save its data"),
        (b"-DENIED Redis is running in protected mode\r\n", "protected mode"),
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak as Redis does"),
    ],
)
async def test_a_server_that_is_not_ready_is_told_as_such(reply: bytes, reason: str) -> None:
    async with server_that_says(reply) as url:
        message = await refusal(url, CALLS["status"])
    assert reason in message
    assert SECRET not in message


async def test_a_full_server_refuses_submissions_with_the_reason() -> None:
    with running(valkey_binary()) as server:
        with server.client() as redis:
            redis.set("ballast", "x" * 1000)
            redis.config_set("maxmemory", 1)
        async with Client(server.url, queue="q") as client:
            with pytest.raises(QueueUnavailable, match="out of memory"):
                await client.submit(make_job("a"))
            assert (await client.depth()).total == 0


@pytest.mark.parametrize(
    "url", [f"redis://:{SECRET}#1@host", f"redis://:{SECRET}/1@host:x", f"http://:{SECRET}@h"]
)
async def test_a_url_that_is_none_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match="URL") as caught:
        Client(url, queue="q")
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigurationError, match="URL"):
        await queue_names(url)


async def test_a_wait_outlasts_a_restart_of_the_server() -> None:
    """celery#8030: a connection that was reset must not leave a process that is alive and deaf."""
    with running(valkey_binary(), "--appendonly", "yes", "--appendfsync", "always") as server:
        async with Client(server.url, queue="q") as client:
            await client.submit_batch([make_job("a", prompt="echo"), make_job("b", prompt="echo")])
            waiting = asyncio.create_task(client.result(JobId("a"), timeout=20))
            collecting = asyncio.create_task(anext(client.as_completed([JobId("b")], timeout=20)))
            await asyncio.wait([waiting, collecting], timeout=0.1)
            server.kill()
            await asyncio.wait([waiting, collecting], timeout=0.2)
            assert not waiting.done()
            await asyncio.to_thread(server.start)
            async with open_queue(server.url, "q") as queue:
                await work(queue)
            assert (await waiting).text == (await collecting).text == "echo"


async def test_a_wait_for_room_outlasts_a_restart_of_the_server() -> None:
    settings = ClientSettings(queue=QueueSettings(max_depth=1))
    with running(valkey_binary(), "--appendonly", "yes", "--appendfsync", "always") as server:
        async with Client(server.url, queue="q", settings=settings) as client:
            await client.submit(make_job("a", prompt="echo"))
            entering = asyncio.create_task(client.submit(make_job("b"), wait_for_room=60.0))
            await asyncio.wait([entering], timeout=0.1)
            server.kill()
            while not client._queue._link._outage:  # until a try has met it
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.start)
            async with open_queue(server.url, "q") as queue:
                await work(queue)
            assert await entering == "b"


async def test_a_wait_for_room_is_given_up_when_the_server_stays_away() -> None:
    settings = ClientSettings(queue=QueueSettings(max_depth=1), patience=0.2)
    with running(valkey_binary()) as server:
        async with Client(server.url, queue="q", settings=settings) as client:
            await client.submit(make_job("a"))
            entering = asyncio.create_task(client.submit(make_job("b"), wait_for_room=math.inf))
            await asyncio.wait([entering], timeout=0.1)
            server.kill()
            with pytest.raises(QueueUnavailable, match="cannot be reached"):
                await entering


async def test_a_wait_is_given_up_when_the_server_stays_away() -> None:
    with running(valkey_binary()) as server:
        async with Client(server.url, queue="q", settings=ClientSettings(patience=0.2)) as client:
            waiting = asyncio.create_task(client.result(await client.submit(make_job("a"))))
            await asyncio.wait([waiting], timeout=0.1)
            server.kill()
            with pytest.raises(QueueUnavailable, match="cannot be reached"):
                await waiting


async def test_closing_while_the_server_is_away_does_not_hang() -> None:
    """bullmq#2430: close while Redis is down."""
    with running(valkey_binary()) as server:
        client = Client(server.url, queue="q")
        waiting = asyncio.create_task(client.result(await client.submit(make_job("a"))))
        await asyncio.wait([waiting], timeout=0.1)
        server.kill()
        async with asyncio.timeout(3):
            await client.close()
        with pytest.raises(QueueUnavailable):
            await waiting
