"""Connections: one shape of replies, and commands that end when they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

from tests.tidemill.servers import running, valkey_binary
from tidemill.connection import MAX_BLOCK, SOCKET_TIMEOUT, address_of, blocking_twin, connect
from tidemill.moves import QueueSettings


def test_replies_have_one_shape() -> None:
    options = connect("redis://localhost:7/3").connection_pool.connection_kwargs
    assert (options["protocol"], options["decode_responses"]) == (2, False)
    assert (options["db"], options["socket_timeout"]) == (3, SOCKET_TIMEOUT)


def test_a_silent_connection_is_noticed_between_a_block_and_a_renewal() -> None:
    """vibetuner#2035: the client's timeout was below its BLOCK, and the worker exited."""
    assert MAX_BLOCK < SOCKET_TIMEOUT <= QueueSettings().lease / 3


def test_the_address_names_no_credentials() -> None:
    assert address_of(connect("redis://user:secret@somewhere:7/0")) == "somewhere:7"
    assert address_of(connect("unix:///run/redis.sock")) == "/run/redis.sock"
    assert address_of(connect("redis+sentinel://u:secret@a,[::1]:7/s")) == "s (sentinels a:26379, [::1]:7)"
    assert address_of(connect("rediss+cluster://u:secret@a,b:7")) == "cluster a:6379, b:7"


Send = Callable[[AbstractConnection, Iterable[bytes]], Awaitable[None]]


async def echo(client: Redis, word: str) -> object:
    return await client.echo(word)


def cancel_when_sent(monkeypatch: pytest.MonkeyPatch, word: bytes) -> None:
    """Cancel whoever sends `word`, in the very turn in which it is sent.

    This is the moment in which `asyncio.wait_for` of Python 3.11 has its value and lets go of the
    cancellation.
    """
    send: Send = AbstractConnection._send_packed_command

    async def send_and_cancel(connection: AbstractConnection, command: Iterable[bytes]) -> None:
        pieces = list(command)
        await send(connection, pieces)
        if any(word in piece for piece in pieces):
            monkeypatch.undo()
            task.cancel()

    [task] = [one for one in asyncio.all_tasks() if one.get_name() == "sender"]
    monkeypatch.setattr(AbstractConnection, "_send_packed_command", send_and_cancel)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize("word", [b"ECHO", b"SELECT"], ids=["command", "greeting"])
async def test_a_cancellation_is_heard_at_every_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, word: bytes
) -> None:
    """Tasks went on after they were cancelled, and whoever awaited their end hung (cpython#86296).

    The reply that nobody waits for any more is not given to the next command (redis-py#2624).
    """
    path = tmp_path / "socket"
    with running(valkey_binary(), "--unixsocket", str(path)) as server:
        client = connect(f"{server.url[:-1]}1" if kind == "tcp" else f"unix://{path}?db=1")
        sender = asyncio.create_task(echo(client, "lost"), name="sender")
        cancel_when_sent(monkeypatch, word)

        with pytest.raises(asyncio.CancelledError):
            await sender

        assert sender.cancelled()
        assert await client.echo("next") == b"next"
        await client.aclose()


async def test_a_time_limit_on_a_command_is_kept_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is a cancellation too, and ends as what it is."""
    with running(valkey_binary()) as server:
        client = connect(server.url)

        async def limited() -> None:
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                await client.echo("late")

        limits: list[asyncio.Timeout] = []
        sender = asyncio.create_task(limited(), name="sender")
        send: Send = AbstractConnection._send_packed_command

        async def send_and_expire(connection: AbstractConnection, command: Iterable[bytes]) -> None:
            await send(connection, command)
            limits[0]._on_timeout()  # type: ignore[attr-defined]

        monkeypatch.setattr(AbstractConnection, "_send_packed_command", send_and_expire)

        with pytest.raises(TimeoutError):
            await sender

        await client.aclose()


@pytest.mark.parametrize(
    "url",
    [
        *("redis://a", "rediss://a", "unix:///a", "redis+sentinel://a/s", "rediss+sentinel://a/s"),
        *("redis+cluster://a", "rediss+cluster://a"),
    ],
)
async def test_every_kind_of_connection_hears_cancellations(url: str) -> None:
    """The twin for blocking reads is made of the same kind."""
    client = connect(url)

    kinds = {one.connection_pool.connection_class for one in (client, blocking_twin(client))}
    assert len(kinds) == 1
    assert all(kind.send_packed_command is not AbstractConnection.send_packed_command for kind in kinds)
