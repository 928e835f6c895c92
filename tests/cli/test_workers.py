"""`tidemill workers`: who serves what, and what each has room for."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.fleet import make_report, report
from tests.cli.outcome import Outcome, Run
from tests.processes import confined
from tests.tidemill.servers import Server, running, valkey_binary
from tidemill.exit_codes import ExitCode
from tidemill.registry import WorkerState
from tidemill_producer.commands.workers import VAIN_DISCOVERY_INTERVAL, Fleet


@pytest.fixture
def other() -> str:
    """Another queue."""
    return f"other/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def fleet(server: Server, queue: str, other: str) -> None:
    """A worker that serves the queue and one that leaves; one of another queue that has stalled."""
    report(
        server,
        make_report("mill-1", queue),
        make_report("mill-2", queue, state=WorkerState.DRAINING, waiting=0, kv_usage=0.123),
        make_report("far-1", other, state=WorkerState.STALLED, model="[bold]"),
    )


@pytest.mark.usefixtures("fleet")
def test_people_get_a_table(tidemill: Run, queue: str, other: str) -> None:
    shown = tidemill("workers", "-q", queue, "-q", other)
    title, *rows = [line.split() for line in shown.out.splitlines()]
    assert title == ["WORKER", "QUEUE", "MODEL", "STATE", "RUNNING", "WAITING", "ROOM", "KV", "HEARD"]
    assert [row[:8] for row in rows] == [
        ["mill-1", queue, "m", "serving", "3/8", "1", "4", "50%"],
        ["mill-2", queue, "m", "draining", "3/8", "0", "0", "12%"],
        ["far-1", other, "[bold]", "stalled", "3/8", "1", "0", "50%"],
    ]
    assert all(row[9:] == ["s", "ago"] for row in rows)


def test_a_state_of_a_newer_version_is_shown_as_unknown(tidemill: Run, server: Server, queue: str) -> None:
    report(server, make_report("mill-1", queue, state=WorkerState.UNKNOWN))
    _, row = (line.split() for line in tidemill("workers", "-q", queue).out.splitlines())
    assert (row[3], row[6]) == ("unknown", "0")


def test_a_model_that_its_queue_is_named_after_is_not_named_twice(
    tidemill: Run, server: Server, queue: str
) -> None:
    """Names get the room of a narrow terminal that the numbers leave."""
    report(server, make_report("mill-1", queue, model=queue))
    title, row = (line.split() for line in tidemill("workers", "-q", queue).out.splitlines())
    assert title == ["WORKER", "QUEUE", "STATE", "RUNNING", "WAITING", "ROOM", "KV", "HEARD"]
    assert row[:4] == ["mill-1", queue, "serving", "3/8"]


async def test_a_server_without_queues_is_not_walked_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find the names of queues is to walk all keys of the server."""
    now, walks = 1000.0, 0

    async def queue_names(_: str) -> list[str]:
        nonlocal walks
        walks += 1
        return []

    monkeypatch.setattr("tidemill_producer.commands.workers.queue_names", queue_names)
    fleet = Fleet("redis://127.0.0.1:1", None, clock=lambda: now)
    for _ in range(5):
        assert await fleet.look() == []
    assert walks == 1
    now += VAIN_DISCOVERY_INTERVAL
    assert await fleet.look() == []
    assert walks == 2


@pytest.mark.usefixtures("fleet")
def test_programs_get_json(tidemill: Run, queue: str) -> None:
    first, second = tidemill("workers", "-q", queue, "--json").objects
    age = first.pop("age")
    assert 0 <= age < 60
    assert first == make_report("mill-1", queue).model_dump(mode="json") | {"room": 4}
    assert (second["name"], second["state"], second["room"]) == ("mill-2", "draining", 0)


@pytest.mark.usefixtures("fleet")
def test_all_queues_are_shown_unless_some_are_named(tidemill: Run, queue: str, other: str) -> None:
    """Given queues without jobs or cards, those that have workers are found."""
    assert {shown["queue"] for shown in tidemill("workers", "--json").objects} >= {queue, other}
    assert {shown["name"] for shown in tidemill("workers", "--json", "-q", other).objects} == {"far-1"}


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_queue_that_nobody_serves_is_one_clear_line(tidemill: Run, options: list[str]) -> None:
    shown = tidemill("workers", "-q", "nothing-here", *options)
    assert shown == Outcome(ExitCode.OK, "", "tidemill: no worker serves queue nothing-here\n")


def test_a_server_without_workers_is_one_clear_line(tidemill: Run) -> None:
    with running(valkey_binary()) as empty:
        shown = tidemill("workers", "--redis-url", empty.url)
    assert shown == Outcome(ExitCode.OK, "", "tidemill: no worker serves any queue here\n")


def test_two_ways_of_showing_are_wrong_usage(tidemill: Run) -> None:
    shown = tidemill("workers", "--json", "--watch", "1")
    assert (shown.code, shown.out) == (ExitCode.USAGE, "")


def test_redis_down_is_one_line_without_the_password(tidemill: Run) -> None:
    shown = tidemill("workers", "--redis-url", "redis://:hunter2@127.0.0.1:1/0")
    assert (shown.code, shown.out, shown.err.count("\n")) == (ExitCode.UNAVAILABLE, "", 1)
    assert "hunter2" not in shown.err


@contextmanager
def watching(url: str, terminal: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tidemill", "workers", "--watch", "0.1", "--redis-url", url]
    with confined(subprocess.Popen(command, stdout=terminal, env=os.environ | {"TERM": "xterm"})) as process:
        yield process


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_a_watch_shows_what_changes_and_outages_until_it_is_interrupted(queue: str, kind: str) -> None:
    readable, writable = pty.openpty() if kind == "terminal" else os.pipe()
    guard = threading.Timer(60, os.close, [writable])
    with running(valkey_binary()) as server, watching(server.url, writable) as process:
        guard.start()
        read_until(readable, b"no worker serves any queue here")
        server.kill()
        read_until(readable, b"cannot be reached")
        server.start()
        report(server, make_report("mill-1", queue))
        read_until(readable, b"mill-1")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == ExitCode.OK
        guard.cancel()
    os.close(readable)
    os.close(writable)


def read_until(descriptor: int, text: bytes) -> None:
    seen = b""
    while text not in seen:
        seen += os.read(descriptor, 65536)
