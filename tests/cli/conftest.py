"""The `tidemill` command, run in this process on a real queue."""

from __future__ import annotations

import io
import sys
import uuid
from collections.abc import Iterator

import pytest

from tests.cli.outcome import Outcome, Run
from tests.tidemill.echo_worker import echo_worker
from tests.tidemill.servers import Server, running, valkey_binary
from tidemill.__main__ import main
from tidemill.blocking import BlockingClient


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running(valkey_binary()) as started:
        yield started


@pytest.fixture
def queue() -> str:
    return f"test/{uuid.uuid4().hex[:12]}"


@pytest.fixture
def worker(server: Server, queue: str) -> Iterator[None]:
    with echo_worker(server.url, queue):
        yield


@pytest.fixture
def client(server: Server, queue: str) -> Iterator[BlockingClient]:
    with BlockingClient(server.url, queue=queue) as made:
        yield made


@pytest.fixture
def tidemill(
    server: Server, queue: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command against the test's queue, which it finds in the environment."""
    monkeypatch.setenv("REDIS_URL", server.url)
    monkeypatch.setenv("TIDEMILL_QUEUE", queue)

    def run(*arguments: str, stdin: bytes = b"") -> Outcome:
        given = io.BytesIO(stdin)
        given.name = "<stdin>"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(given))
        code = main(list(arguments))
        return Outcome(code, *capfd.readouterr())

    return run
