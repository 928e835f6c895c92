"""Connections: one shape of replies, and refusals that say what is wrong."""

from __future__ import annotations

import pytest
from redis import exceptions

from tidemill.connection import MAX_BLOCK, SOCKET_TIMEOUT, address_of, connect, unavailable
from tidemill.errors import ConfigurationError
from tidemill.moves import QueueSettings


@pytest.mark.parametrize("url", ["http://example.org", "nonsense", "redis://host:port/0", ""])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="not a Redis URL"):
        connect(url)


def test_the_url_cannot_change_the_shape_of_replies() -> None:
    client = connect("redis://localhost:7/3?protocol=3&decode_responses=True&socket_timeout=1")

    options = client.connection_pool.connection_kwargs
    assert (options["protocol"], options["decode_responses"]) == (2, False)
    assert (options["db"], options["socket_timeout"]) == (3, SOCKET_TIMEOUT)


def test_a_silent_connection_is_noticed_between_a_block_and_a_renewal() -> None:
    """vibetuner#2035: the client's timeout was below its BLOCK, and the worker exited."""
    assert MAX_BLOCK < SOCKET_TIMEOUT <= QueueSettings().lease / 3


def test_the_address_names_no_credentials() -> None:
    assert address_of(connect("redis://user:secret@somewhere:7/0")) == "somewhere:7"
    assert address_of(connect("unix:///run/redis.sock")) == "/run/redis.sock"


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
        (exceptions.NoScriptError("NOSCRIPT none"), "keeps losing its scripts"),
        (exceptions.ClusterDownError("CLUSTERDOWN"), "belongs to a cluster that is down"),
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
