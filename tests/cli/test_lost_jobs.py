"""What the command says when a job begins anew, or is lost with the server's data, while it waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.cli.outcome import Run
from tests.tidemill.echo_worker import deltas, open_queue
from tests.tidemill.servers import Server
from tidemill.blocking import BlockingClient
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Delta, Job, JobId, Result, Status
from tidemill.moves import Renewal
from tidemill.queue import Queue

JOB = JobId("a")
SOON = 20.0
"""Seconds; a guard against waiting for ever."""


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """`work` in another thread, while the command runs in this one."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(SOON)
        assert not thread.is_alive()


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


class Restarting:
    """Two workers of different builds: what the first one generates is void once the second one begins."""

    def __init__(self, server: Server, queue: str, old: tuple[Delta, ...], new: tuple[Delta, ...]) -> None:
        self._server = server
        self._queue = queue
        self._old = old
        self._new = new

    def __call__(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        async with open_queue(self._server.url, self._queue) as queue:
            attempt = await self._generate(queue, "old", self._old)
            await asyncio.to_thread(until, self._all_is_read)
            await queue.release("old", [Renewal(JOB, attempt)])
            attempt = await self._generate(queue, "new", self._new)
            text = "".join(delta.text for delta in self._new if delta.choice == 0)
            tokens = tuple(token for delta in self._new if delta.choice == 0 for token in delta.token_ids)
            result = Result(id=JOB, status=Status.SUCCEEDED, text=text, token_ids=tokens)
            await queue.finish("new", attempt, result)

    async def _generate(self, queue: Queue, worker: str, pieces: tuple[Delta, ...]) -> int:
        while not (claimed := await queue.claim(worker, 1, fingerprint=worker)):
            await queue.wait(0.05)
        await queue.renew(worker, [Renewal(JOB, claimed[0].attempt, pieces)])
        return claimed[0].attempt

    def _all_is_read(self) -> bool:
        """A reader that blocks now has had what was published before."""
        with self._server.client() as redis:
            return any(client["cmd"] == "xread" and "b" in client["flags"] for client in redis.client_list())


def of_choices(*pieces: tuple[int, str]) -> tuple[Delta, ...]:
    """Pieces of a token each: which generation, and its text."""
    return tuple(
        Delta(index=index, choice=choice, text=text, token_ids=(index,))
        for index, (choice, text) in enumerate(pieces)
    )


def test_a_restart_is_one_line_for_people(tidemill: Run, server: Server, queue: str) -> None:
    with meanwhile(Restarting(server, queue, deltas("draft"), deltas("final"))):
        shown = tidemill("submit", "x", "--id", "a", "--stream")
    assert (shown.code, shown.out) == (ExitCode.OK, "draft\nfinal\n")
    assert shown.err == "tidemill: begun anew by another worker; what was printed so far is void\n"


def test_programs_see_the_restart_in_the_delta(tidemill: Run, server: Server, queue: str) -> None:
    with meanwhile(Restarting(server, queue, deltas("draft"), deltas("final"))):
        *pieces, result = tidemill("submit", "x", "--id", "a", "--stream", "--json").objects
    assert [piece["restart"] for piece in pieces] == [False] * 5 + [True] + [False] * 4
    assert "".join(piece["text"] for piece in pieces[5:]) == result["text"] == "final"


def test_after_a_restart_all_generations_are_the_new_ones(tidemill: Run, server: Server, queue: str) -> None:
    old = of_choices((0, "old "), (1, "stale "))
    new = of_choices((0, "new "), (1, "fresh "), (0, "text"))
    with meanwhile(Restarting(server, queue, old, new)):
        shown = tidemill("submit", "x", "--id", "a", "--n", "2", "--stream")
    assert shown.out == "--- 1 of 2\nold \nnew text\n--- 2 of 2\nfresh \n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["result", "a", "--wait"],
        ["submit", "x", "--id", "a", "--wait"],
        ["submit", "x", "--id", "a", "--stream"],
        ["submit", "--file", "-", "--wait"],
    ],
    ids=["result", "submit", "stream", "file"],
)
def test_a_job_that_is_lost_is_one_line_and_an_exit_status(
    tidemill: Run, server: Server, queue: str, client: BlockingClient, arguments: list[str]
) -> None:
    if arguments[0] == "result":
        client.submit(Job(id=JOB, prompt="x"))

    def lose() -> None:
        with server.client() as redis:
            until(lambda: redis.exists(f"tidemill:{{{queue}}}:job:a"))
            redis.delete(*redis.keys(f"tidemill:{{{queue}}}:*"))

    with meanwhile(lose):
        shown = tidemill(*arguments, stdin=b'{"id": "a", "prompt": "x"}\n')
    assert (shown.code, shown.out.strip(), shown.err.count("\n")) == (ExitCode.UNKNOWN_JOB, "", 1)
    assert shown.err.startswith(f"tidemill: job a is unknown in queue {queue}")
