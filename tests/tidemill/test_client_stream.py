"""Streams: the text of a generation in pieces, each once and in order, whenever one begins to read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.tidemill.echo_worker import FAIL, deltas, work
from tests.tidemill.factories import make_job
from tests.tidemill.servers import Server
from tidemill.client import Client
from tidemill.errors import JobUnknown
from tidemill.jobs import Choice, Delta, FinishReason, JobId, Result, Status, TokenLogprobs
from tidemill.moves import Renewal
from tidemill.queue import Queue

TEXT = "whole"


def ended(text: str) -> list[Delta]:
    """All pieces of a text, when the last one comes with the result, which says why it ends there."""
    *pieces, last = deltas(text)
    return [*pieces, last.model_copy(update={"finish_reason": FinishReason.STOP})]


async def read(client: Client, job_id: JobId) -> list[Delta]:
    async with asyncio.timeout(10):
        return [delta async for delta in client.stream(job_id)]


async def publish(queue: Queue, worker: str, attempt: int, pieces: tuple[Delta, ...]) -> None:
    outcome = await queue.renew(worker, [Renewal(JobId("a"), attempt, pieces)])
    assert not outcome.lost


async def end(queue: Queue, worker: str, attempt: int, **fields: object) -> None:
    result = Result(
        id=JobId("a"), status=Status.SUCCEEDED, text=TEXT, token_ids=tuple(map(ord, TEXT))
    ).model_copy(update=fields)
    assert await queue.finish(worker, attempt, result) == "ok"


async def test_pieces_come_while_the_job_runs(client: Client, worker_side: Queue) -> None:
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    pieces = client.stream(JobId("a"))
    (claimed,) = await worker_side.claim("one", 1)
    seen = []
    for piece in deltas(TEXT)[:3]:
        await publish(worker_side, "one", claimed.attempt, (piece,))
        seen.append(await anext(pieces))
    await end(worker_side, "one", claimed.attempt)
    rest = [piece async for piece in pieces]
    assert seen == list(deltas(TEXT)[:3])
    assert rest == [Delta(index=3, text="le", token_ids=tuple(map(ord, "le")))]


async def test_one_who_comes_late_reads_from_the_beginning(client: Client, worker_side: Queue) -> None:
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    (claimed,) = await worker_side.claim("one", 1)
    await publish(worker_side, "one", claimed.attempt, deltas(TEXT)[:4])
    reading = asyncio.create_task(read(client, JobId("a")))
    await asyncio.wait([reading], timeout=0.05)
    await end(worker_side, "one", claimed.attempt)
    assert await reading == list(deltas(TEXT))


async def test_one_who_comes_after_the_end_gets_it_all(client: Client, worker_side: Queue) -> None:
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    await work(worker_side)
    assert await read(client, JobId("a")) == ended(TEXT)


async def test_one_who_comes_after_the_pieces_are_gone_gets_it_in_one(
    client: Client, worker_side: Queue, valkey: Server
) -> None:
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    await work(worker_side)
    with valkey.client() as redis:
        redis.delete(worker_side.keys.deltas(JobId("a")))
    assert await read(client, JobId("a")) == [
        Delta(index=0, text=TEXT, token_ids=tuple(map(ord, TEXT)), finish_reason=FinishReason.STOP)
    ]


async def test_a_job_that_moves_to_another_worker_is_read_without_gap_or_repeat(
    client: Client, worker_side: Queue
) -> None:
    """S#39645: a restarted generation must not be spliced to what was streamed before."""
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    reading = asyncio.create_task(read(client, JobId("a")))
    (claimed,) = await worker_side.claim("one", 1)
    await publish(worker_side, "one", claimed.attempt, deltas(TEXT)[:2])
    await worker_side.release("one", [Renewal(JobId("a"), claimed.attempt, deltas(TEXT)[2:3])])
    (resumed,) = await worker_side.claim("two", 1)
    assert resumed.checkpoint == deltas(TEXT)[:3]
    await publish(worker_side, "two", resumed.attempt, deltas(TEXT)[3:4])
    await end(worker_side, "two", resumed.attempt)
    assert await reading == list(deltas(TEXT))


async def test_a_job_not_meant_for_streaming_can_be_read_too(client: Client, worker_side: Queue) -> None:
    await client.submit(make_job("a", prompt=TEXT))
    reading = asyncio.create_task(read(client, JobId("a")))
    await asyncio.wait([reading], timeout=0.05)
    await work(worker_side)
    assert "".join(piece.text for piece in await reading) == TEXT


async def test_a_job_that_fails_ends_the_stream(client: Client, worker_side: Queue) -> None:
    await client.submit(make_job("a", prompt=FAIL, stream=True))
    await work(worker_side)
    assert await read(client, JobId("a")) == []
    assert (await client.result(JobId("a"))).status is Status.FAILED


async def test_what_was_streamed_before_a_failure_stays(client: Client, worker_side: Queue) -> None:
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    (claimed,) = await worker_side.claim("one", 1)
    await publish(worker_side, "one", claimed.attempt, deltas(TEXT)[:2])
    await end(worker_side, "one", claimed.attempt, status=Status.FAILED, text="", token_ids=())
    assert await read(client, JobId("a")) == list(deltas(TEXT)[:2])


async def test_a_stream_without_end_is_a_timeout(client: Client, worker_side: Queue) -> None:
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    (claimed,) = await worker_side.claim("one", 1)
    await publish(worker_side, "one", claimed.attempt, deltas(TEXT)[:2])
    seen = []
    with pytest.raises(TimeoutError, match="job a has not ended after"):
        async for piece in client.stream(JobId("a"), timeout=0.05):
            seen.append(piece)
    assert seen == list(deltas(TEXT)[:2])


async def test_a_stream_that_has_ended_takes_no_time(client: Client, worker_side: Queue) -> None:
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    await work(worker_side)
    assert [piece async for piece in client.stream(JobId("a"), timeout=0)] == ended(TEXT)


async def test_a_stream_ends_at_the_deadline_though_nobody_serves_the_queue(client: Client) -> None:
    await client.submit(make_job("a", stream=True, deadline=0.01))
    assert await read(client, JobId("a")) == []
    assert (await client.result(JobId("a"))).status is Status.EXPIRED


async def test_an_unknown_job_is_told_at_once(client: Client) -> None:
    with pytest.raises(JobUnknown, match="ghost"):
        await read(client, JobId("ghost"))


async def test_a_job_that_vanishes_ends_the_stream_with_an_error(
    client: Client, worker_side: Queue, valkey: Server
) -> None:
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    reading = asyncio.create_task(read(client, JobId("a")))
    await asyncio.wait([reading], timeout=0.05)
    with valkey.client() as redis:
        redis.delete(worker_side.keys.job(JobId("a")))
    with pytest.raises(JobUnknown):
        await reading


async def test_a_reader_that_leaves_disturbs_nobody(client: Client, worker_side: Queue) -> None:
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    leaving, staying = (asyncio.create_task(read(client, JobId("a"))) for _ in range(2))
    await asyncio.wait([leaving, staying], timeout=0.05)
    leaving.cancel()
    await work(worker_side)
    assert await staying == ended(TEXT)


def make_choice(index: int, tokens: range) -> Choice:
    logprobs = tuple(TokenLogprobs(token_id=token, logprob=-0.5, rank=1) for token in tokens)
    return Choice(index=index, text=text_of(tokens), token_ids=tuple(tokens), logprobs=logprobs)


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def piece_of(choice: Choice, first: int, end: int, *, after: int) -> Delta:
    """Tokens `first` to `end` of a choice, after so many tokens of the job."""
    tokens = choice.token_ids[first:end]
    logprobs = (choice.logprobs or ())[first:end]
    return Delta(index=after, choice=choice.index, text=text_of(tokens), token_ids=tokens, logprobs=logprobs)


def as_result(first: Choice, *others: Choice) -> dict[str, object]:
    """The fields of a result that hold these generations."""
    return first.model_dump(exclude={"index", "logprobs"}) | {
        "token_ids": first.token_ids,
        "logprobs": first.logprobs,
        "alternatives": others,
    }


async def test_the_generations_of_a_job_are_told_apart(client: Client, worker_side: Queue) -> None:
    """Given pieces of two of three generations, when the job ends, then the rest of each comes last."""
    first, second, third = (make_choice(i, range(10 * i + 10, 10 * i + 15)) for i in range(3))
    await client.submit(make_job("a", prompt=TEXT, stream=True))
    (claimed,) = await worker_side.claim("one", 1)
    published = (
        piece_of(first, 0, 2, after=0),
        piece_of(third, 0, 1, after=2),
        piece_of(first, 2, 3, after=3),
        piece_of(third, 1, 5, after=4),
    )
    await publish(worker_side, "one", claimed.attempt, published)
    reading = asyncio.create_task(read(client, JobId("a")))
    await asyncio.wait([reading], timeout=0.05)
    await end(worker_side, "one", claimed.attempt, **as_result(first, second, third))
    assert await reading == [*published, piece_of(first, 3, 5, after=8), piece_of(second, 0, 5, after=10)]


async def test_generations_without_pieces_come_whole(client: Client, worker_side: Queue) -> None:
    first, second = make_choice(0, range(10, 13)), make_choice(1, range(20, 24))
    await client.submit(make_job("a", prompt=TEXT))
    (claimed,) = await worker_side.claim("one", 1)
    await end(worker_side, "one", claimed.attempt, **as_result(first, second))
    assert await read(client, JobId("a")) == [piece_of(first, 0, 3, after=0), piece_of(second, 0, 4, after=3)]
