"""Refusals of Redis and of the network: each is told by its reason, and a fault of ours is none."""

from __future__ import annotations

import asyncio

import pytest
from redis import exceptions
from redis.asyncio import Redis

from tests.tidemill.servers import Server, redis_binary, running, valkey_binary
from tidemill.connection import blocking_twin, connect
from tidemill.errors import QueueUnavailable
from tidemill.refusals import refusals_explained, unavailable
from tidemill.topology import PrimaryUnknown


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (exceptions.ConnectionError("refused"), "cannot be reached: refused"),
        (exceptions.TimeoutError("slow"), "does not answer"),
        (exceptions.AuthenticationError("WRONGPASS"), "refuses the credentials"),
        (exceptions.NoPermissionError("NOPERM"), "does not permit"),
        (exceptions.BusyLoadingError("LOADING"), "is loading its data"),
        (exceptions.OutOfMemoryError("OOM"), "is out of memory"),
        (exceptions.ReadOnlyError("READONLY"), "is a read-only replica"),
        (exceptions.ResponseError("MISCONF disk"), "cannot save its data"),
        (exceptions.NoScriptError("No matching script."), "keeps losing its scripts"),
        (exceptions.ClusterDownError("CLUSTERDOWN"), "belongs to a cluster that is down"),
        (exceptions.MasterDownError("MASTERDOWN"), "has lost its primary"),
        (exceptions.MovedError("9 b:1"), "does not hold this queue"),
        (exceptions.AskError("9 b:1"), "is handing this queue over"),
        (exceptions.TryAgainError("TRYAGAIN"), "is handing this queue over"),
        (exceptions.ResponseError("NOREPLICAS"), "has too few replicas"),
        (exceptions.ResponseError("UNBLOCKED force"), "has become a replica"),
        (exceptions.ResponseError("ACL failure in script: User u"), "does not permit"),
        (exceptions.ResponseError("The user executing the script can't run this"), "does not permit"),
        (
            exceptions.ExecAbortError("Transaction discarded"),
            "has discarded a transaction",
        ),
        (exceptions.InvalidResponse("Protocol Error: b'HTTP/1.1'"), "does not speak as Redis does"),
        (exceptions.ResponseError("DENIED Redis is running in protected mode"), "lets nobody in"),
        (exceptions.ResponseError("BUSY Valkey is busy running a script"), "is busy with somebody's script"),
        (PrimaryUnknown("a:1: refused"), "has no primary that could be found: a:1: refused"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_refusals_are_told_apart(error: exceptions.RedisError, reason: str) -> None:
    translated = unavailable(error, connect("redis://somewhere:7/0"))

    assert translated is not None
    assert f"somewhere:7 {reason}" in str(translated)


def test_a_fault_of_our_own_is_not_called_unavailable() -> None:
    client = connect("redis://somewhere:7/0")

    assert unavailable(exceptions.ResponseError("ERR unknown command"), client) is None
    assert unavailable(exceptions.ResponseError(""), client) is None


@pytest.mark.parametrize(
    ("error", "made_anew"),
    [
        (exceptions.ReadOnlyError("READONLY"), True),
        (exceptions.MovedError("9 b:1"), True),
        (exceptions.TimeoutError("slow"), True),
        (exceptions.ExecAbortError("EXECABORT"), True),
        (exceptions.ResponseError("NOREPLICAS few"), True),
        (exceptions.ResponseError("UNBLOCKED force"), True),
        (exceptions.ResponseError("MISCONF disk"), False),
        (exceptions.OutOfMemoryError("OOM"), False),
        (exceptions.ResponseError("ERR"), False),
    ],
    ids=lambda value: str(value).split()[0],
)
async def test_no_connection_outlives_what_may_have_been_a_failover(
    valkey: Server, error: exceptions.RedisError, made_anew: bool
) -> None:
    async with connect(valkey.url) as redis, blocking_twin(redis) as twin:
        before = [await one.client_id() for one in (redis, twin)]
        with pytest.raises((QueueUnavailable, exceptions.ResponseError)), refusals_explained(redis, twin):
            raise error
        assert ([await one.client_id() for one in (redis, twin)] != before) is made_anew


@pytest.mark.parametrize("binary", [valkey_binary(), redis_binary()], ids=["valkey", "redis"])
async def test_a_script_that_somebody_killed_is_a_refusal(binary: str) -> None:
    """Redis says ERR, as for any fault in a script. What the script does may be repeated."""
    with running(binary, "--lua-time-limit", "10") as server:
        async with connect(server.url) as redis, connect(server.url) as operator:
            endless = asyncio.create_task(redis.eval("while true do end", 0))
            await kill_script(operator)
            with pytest.raises(QueueUnavailable, match="was told to kill"), refusals_explained(redis):
                await endless


async def kill_script(redis: Redis) -> None:
    """As soon as one runs."""
    while True:
        try:
            await redis.script_kill()
            return
        except exceptions.ResponseError as error:
            assert str(error).startswith("NOTBUSY")
