"""A server of our own keeps what it acknowledged, however it ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import redis
from servers import KINDS, OwnServer, running


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_data_outlives_the_process(kind: str, how: signal.Signals, tmp_path: Path) -> None:
    with running(kind, tmp_path, appendfsync="always") as server:
        with server.client() as client:
            client.set("name", "tide")
        server.end(how)
        server.start()
        with server.client() as client:
            assert client.get("name") == b"tide"


def test_nothing_runs_after_the_block(tmp_path: Path) -> None:
    with running("valkey", tmp_path) as server:
        pass
    with server.client() as client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    server = OwnServer("valkey", tmp_path, maxmemory="plenty")
    with pytest.raises(RuntimeError, match="plenty"):
        server.start()
