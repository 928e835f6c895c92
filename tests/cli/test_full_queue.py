"""`tidemill submit --wait-for-room`: a full queue is waited out, or told of when the time is over."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial

import pytest

from tests.cli.outcome import Run
from tests.tidemill.echo_worker import echo_worker
from tests.tidemill.servers import Server
from tidemill.blocking import BlockingClient
from tidemill.client import ClientSettings
from tidemill.errors import QueueFull, QueueUnavailable
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Job
from tidemill.moves import QueueSettings, SubmitOutcome
from tidemill.patience import Patience
from tidemill.queue import Queue
from tidemill_producer.commands.jobs_file import JobsFile


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


def lines(*names: str) -> bytes:
    return b"".join(b'{"id": "%s", "prompt": "x"}\n' % name.encode() for name in names)


@pytest.mark.parametrize("options", [[], ["--wait-for-room", "0.1"]])
def test_a_file_that_got_in_by_half_says_where_to_go_on(tidemill: Run, options: list[str]) -> None:
    """Given a bad line among those with room, it is told by itself and is not one to go on from."""
    file = lines("a") + b"{bad\n" + lines("b", "c", "d")
    shown = tidemill("submit", "--file", "-", *options, stdin=file)
    assert (shown.code, shown.out) == (ExitCode.QUEUE_FULL, "a\nb\n")
    assert shown.err.endswith("<stdin>: go on from line 4; all good lines before it were submitted\n")


def test_so_does_one_that_an_outage_has_cut_short(tidemill: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a server that goes away for good while room is waited for."""
    monkeypatch.setattr("tidemill.client.Patience", lambda _: Patience(0.0))
    tries = itertools.count()

    async def submit(queue: Queue, jobs: Sequence[Job], *, reply_to: str) -> list[SubmitOutcome]:
        if next(tries):
            raise QueueUnavailable("away")
        return await ordinary(queue, jobs, reply_to=reply_to)

    ordinary = Queue.submit
    monkeypatch.setattr(Queue, "submit", submit)
    shown = tidemill("submit", "--file", "-", "--wait-for-room", "60", stdin=lines("a", "b", "c", "d"))
    assert (shown.code, shown.out) == (ExitCode.UNAVAILABLE, "a\nb\n")
    assert shown.err == (
        "tidemill: <stdin>: go on from line 3; all good lines before it were submitted\ntidemill: away\n"
    )


def without_id(count: int) -> bytes:
    return b'{"prompt": "x"}\n' * count


def test_lines_without_an_id_are_not_to_run_twice(tidemill: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a connection that breaks when only a part of a batch is in: which part, nobody has heard."""

    async def submit(queue: Queue, jobs: Sequence[Job], *, reply_to: str) -> list[SubmitOutcome]:
        await ordinary(queue, jobs[:1], reply_to=reply_to)
        raise QueueUnavailable("away")

    ordinary = Queue.submit
    monkeypatch.setattr(Queue, "submit", submit)
    shown = tidemill("submit", "--file", "-", stdin=lines("a") + without_id(2) + lines("b"))
    assert shown.err.splitlines()[0] == (
        "tidemill: <stdin>: go on from line 1; all good lines before it were submitted,"
        " as some to line 3 may have been: without an id they would run twice"
    )


def test_nor_are_those_that_got_in_behind_one_that_did_not() -> None:
    """While one finds no room, a worker makes some, or the next is another tenant's."""
    said: list[str] = []
    file = JobsFile("f", without_id(3).splitlines(), defaults={}, report=said.append)
    first, second, third = file
    file.accepted(first.id)
    file.refused(second, QueueFull("full", limit=1))
    file.accepted(third.id)
    file.say_where_to_go_on()
    assert said == [
        "f:2: full",
        "f: go on from line 2; all good lines before it were submitted,"
        " as some to line 3 may have been: without an id they would run twice",
    ]


def test_an_id_that_stands_twice_in_a_file_is_told_of_with_its_line() -> None:
    said: list[str] = []
    file = JobsFile("f", lines("a", "a", "a").splitlines(), defaults={}, report=said.append)
    first, second, third = file
    file.accepted(first.id)
    for job in (second, third):
        file.refused(job, QueueFull("full", limit=1))
    file.say_where_to_go_on()
    assert said == [
        "f:2: full",
        "f:3: full",
        "f: go on from line 2; all good lines before it were submitted",
    ]


def test_who_gives_up_between_two_batches_is_told_of_the_next_line() -> None:
    said: list[str] = []
    file = JobsFile("f", lines("a", "b").splitlines(), defaults={}, report=said.append)
    file.accepted(next(iter(file)).id)
    file.say_where_to_go_on()
    assert said == ["f: go on from line 2; all good lines before it were submitted"]


def test_who_gives_up_waiting_for_answers_is_told_how_far_the_file_got(tidemill: Run) -> None:
    shown = tidemill("submit", "--file", "-", "--wait", "--timeout", "0.1", "--wait-for-room", "60",
        stdin=lines("a", "b", "c"))  # fmt: skip
    assert shown.code == ExitCode.TIMEOUT
    assert "<stdin>: go on from line 3; all good lines before it were submitted" in shown.err


def test_one_of_which_nothing_got_in_does_not(tidemill: Run) -> None:
    shown = tidemill("submit", "--file", "-", "--redis-url", "redis://127.0.0.1:1", stdin=lines("a"))
    assert (shown.code, shown.err.count("\n")) == (ExitCode.UNAVAILABLE, 1)


def test_who_cannot_be_reached_is_not_waited_for(tidemill: Run) -> None:
    """Waiting for room rides out an outage; a wrong address is told at once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Patience, "ride_out", None)
        shown = tidemill("submit", "x", "--wait-for-room", "60", "--redis-url", "redis://127.0.0.1:1")
    assert (shown.code, shown.err.count("\n")) == (ExitCode.UNAVAILABLE, 1)


def test_a_time_below_zero_is_wrong_usage(tidemill: Run) -> None:
    assert tidemill("submit", "x", "--wait-for-room", "-1").code == ExitCode.USAGE
