"""`tidemill submit --wait-for-room`: a full queue is waited out, or told of when the time is over."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.cli.outcome import Run
from tests.tidemill.echo_worker import echo_worker
from tests.tidemill.servers import Server
from tidemill.blocking import BlockingClient
from tidemill.client import ClientSettings
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Job
from tidemill.moves import QueueSettings


@pytest.fixture(autouse=True)
def room_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client of the test holds the queue to be full with two jobs."""
    settings = partial(ClientSettings, queue=QueueSettings(max_depth=2))
    monkeypatch.setattr("tidemill.client.ClientSettings", settings)


@pytest.fixture
def full(client: BlockingClient) -> None:
    list(client.submit_many(Job(prompt="x") for _ in range(2)))


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("options", [[], ["--wait-for-room", "0.1"]])
def test_a_queue_that_stays_full_is_one_line_and_an_exit_status(tidemill: Run, options: list[str]) -> None:
    shown = tidemill("submit", "x", *options)
    assert (shown.code, shown.out, shown.err.count("\n")) == (ExitCode.QUEUE_FULL, "", 1)
    assert shown.err.endswith("holds 2 unfinished jobs\n")


@pytest.mark.usefixtures("full")
def test_one_that_empties_takes_the_job(tidemill: Run, server: Server, queue: str) -> None:
    with echo_worker(server.url, queue):
        shown = tidemill("submit", "echo", "--wait", "--wait-for-room", "60")
    assert (shown.code, shown.out) == (ExitCode.OK, "echo\n")


def test_a_file_is_submitted_as_room_comes(tidemill: Run, server: Server, queue: str) -> None:
    lines = [json.dumps({"id": f"job-{number}", "prompt": "x"}).encode() for number in range(30)]
    with echo_worker(server.url, queue):
        shown = tidemill("submit", "--file", "-", "--wait-for-room", "60", stdin=b"\n".join(lines))
    assert (shown.code, shown.err) == (ExitCode.OK, "")
    assert shown.out.split() == [f"job-{number}" for number in range(30)]


@pytest.mark.usefixtures("full")
def test_a_file_ends_where_the_time_is_over(tidemill: Run) -> None:
    shown = tidemill("submit", "--file", "-", "--wait-for-room", "0.1", stdin=b'{"prompt": "x"}\n' * 3)
    assert (shown.code, shown.out) == (ExitCode.QUEUE_FULL, "")
    assert [line.split(": ")[1] for line in shown.err.splitlines()] == ["<stdin>:1", "<stdin>:2", "<stdin>:3"]


def test_a_time_below_zero_is_wrong_usage(tidemill: Run) -> None:
    assert tidemill("submit", "x", "--wait-for-room", "-1").code == ExitCode.USAGE
