"""Streams of jobs that begin anew, on a worker of another build: what was read before is void."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from tests.tidemill.echo_worker import deltas
from tests.tidemill.factories import make_job
from tidemill.client import Client
from tidemill.errors import ErrorCode
from tidemill.jobs import Delta, ErrorInfo, JobId, Result, Status
from tidemill.moves import CancelOutcome, Claimed, Renewal
from tidemill.queue import Queue

OLD, NEW = "draft", "final text"
JOB = JobId("a")

End = Callable[[Client, Queue, Claimed], Awaitable[None]]


async def take_over(queue: Queue, worker: str) -> Claimed:
    """Claim the job for a worker whose build is its own."""
    (claimed,) = await queue.claim(worker, 1, fingerprint=worker)
    assert claimed.checkpoint == ()
    return claimed


async def publish(queue: Queue, worker: str, claimed: Claimed, pieces: tuple[Delta, ...]) -> None:
    outcome = await queue.renew(worker, [Renewal(JOB, claimed.attempt, pieces)])
    assert not outcome.lost


async def generate_old(client: Client, queue: Queue, length: int = 3) -> None:
    """Leave the beginning of a generation behind."""
    await client.submit(make_job(JOB, stream=True))
    claimed = await take_over(queue, "old")
    await publish(queue, "old", claimed, deltas(OLD)[:length])
    await queue.release("old", [Renewal(JOB, claimed.attempt)])


async def finish(queue: Queue, worker: str, claimed: Claimed, text: str = NEW) -> None:
    result = Result(id=JOB, status=Status.SUCCEEDED, text=text, token_ids=tuple(map(ord, text)))
    assert await queue.finish(worker, claimed.attempt, result) == "ok"


async def take(stream: AsyncGenerator[Delta, None], count: int) -> list[Delta]:
    async with asyncio.timeout(10):
        return [await anext(stream) for _ in range(count)]


async def rest(stream: AsyncGenerator[Delta, None]) -> list[Delta]:
    async with asyncio.timeout(10):
        return [delta async for delta in stream]


def text_of(pieces: list[Delta]) -> str:
    return "".join(piece.text for piece in pieces)


async def test_the_first_piece_after_a_restart_says_so_and_the_new_ones_are_the_whole(
    client: Client, worker_side: Queue
) -> None:
    """S#39645: a generation that began anew must not be spliced to what was streamed before."""
    await generate_old(client, worker_side)
    stream = client.stream(JOB)
    assert await take(stream, 3) == list(deltas(OLD)[:3])
    claimed = await take_over(worker_side, "new")
    await publish(worker_side, "new", claimed, deltas(NEW)[:5])
    await finish(worker_side, "new", claimed)
    first, *others = await rest(stream)
    assert (first.index, first.restart) == (0, True)
    assert not any(piece.restart for piece in others)
    assert text_of([first, *others]) == NEW
    assert [token for piece in [first, *others] for token in piece.token_ids] == list(map(ord, NEW))


@pytest.mark.parametrize("length", [1, 3, 5])
async def test_a_restart_without_a_piece_after_it_is_told_with_the_end(
    client: Client, worker_side: Queue, length: int
) -> None:
    """Given a new generation that was never checkpointed, the result is told from its beginning."""
    await generate_old(client, worker_side, length)
    stream = client.stream(JOB)
    await take(stream, length)
    await finish(worker_side, "new", await take_over(worker_side, "new"))
    (piece,) = await rest(stream)
    assert (piece.index, piece.restart, piece.text) == (0, True, NEW)


async def fail(client: Client, queue: Queue, claimed: Claimed) -> None:
    error = ErrorInfo(code=ErrorCode.INTERNAL, message="asked to fail")
    failed = Result(id=JOB, status=Status.FAILED, error=error)
    assert await queue.finish("new", claimed.attempt, failed) == "ok"


async def cancel(client: Client, queue: Queue, claimed: Claimed) -> None:
    await queue.release("new", [Renewal(JOB, claimed.attempt)])
    assert await client.cancel(JOB) is CancelOutcome.CANCELLED


@pytest.mark.parametrize("end", [fail, cancel])
@pytest.mark.parametrize("length", [0, 3])
async def test_a_restart_that_comes_to_nothing_leaves_the_reader_with_nothing(
    client: Client, worker_side: Queue, end: End, length: int
) -> None:
    """Given a new generation that ends before its first piece, the old one does not stay for its text."""
    await generate_old(client, worker_side)
    stream = client.stream(JOB)
    await take(stream, length)
    await end(client, worker_side, await take_over(worker_side, "new"))
    assert await rest(stream) == ([Delta(index=0, restart=True)] if length else [])


async def test_two_restarts_are_told_each(client: Client, worker_side: Queue) -> None:
    await generate_old(client, worker_side)
    stream = client.stream(JOB)
    await take(stream, 3)
    second = await take_over(worker_side, "second")
    await publish(worker_side, "second", second, deltas("other")[:4])
    assert [piece.restart for piece in await take(stream, 4)] == [True, False, False, False]
    await worker_side.release("second", [Renewal(JOB, second.attempt)])
    third = await take_over(worker_side, "third")
    await publish(worker_side, "third", third, deltas(NEW)[:1])
    await finish(worker_side, "third", third)
    pieces = await rest(stream)
    assert [piece.restart for piece in pieces] == [True, False]
    assert text_of(pieces) == NEW


async def test_one_who_comes_after_the_restart_reads_the_new_generation_only(
    client: Client, worker_side: Queue
) -> None:
    await generate_old(client, worker_side)
    claimed = await take_over(worker_side, "new")
    await publish(worker_side, "new", claimed, deltas(NEW)[:4])
    await finish(worker_side, "new", claimed)
    assert text_of(await rest(client.stream(JOB))) == NEW
