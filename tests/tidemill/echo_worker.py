"""A worker without a model, for tests of those who submit: it answers a prompt with the prompt.

Of several generations, each ends with one `!` more than the one before.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tidemill.connection import connect
from tidemill.errors import ErrorCode
from tidemill.jobs import Choice, Delta, ErrorInfo, FinishReason, Job, Result, Status, Usage
from tidemill.moves import Claimed, Renewal
from tidemill.queue import Queue

FAIL = "fail"
"""A prompt that is answered with an error."""


def deltas(text: str) -> tuple[Delta, ...]:
    """One token a character; the token is its code point."""
    return tuple(
        Delta(index=index, text=character, token_ids=(ord(character),))
        for index, character in enumerate(text)
    )


def answer(claimed: Claimed) -> Result:
    """What this worker makes of a job."""
    job = Job.from_wire(claimed.payload)
    if job.prompt == FAIL:
        error = ErrorInfo(code=ErrorCode.INTERNAL, message="asked to fail")
        return Result(id=job.id, status=Status.FAILED, error=error, attempts=claimed.attempt)
    text = job.prompt if job.prompt is not None else (job.messages or ())[-1].content
    others = tuple(choice_of(text + "!" * index, index) for index in range(1, job.params.n))
    return Result(
        id=job.id,
        status=Status.SUCCEEDED,
        text=text,
        token_ids=tuple(map(ord, text)),
        finish_reason=FinishReason.STOP,
        alternatives=others,
        usage=Usage(prompt_tokens=len(text), completion_tokens=len(text)),
        attempts=claimed.attempt,
        metadata=job.metadata,
    )


def choice_of(text: str, index: int) -> Choice:
    return Choice(index=index, text=text, token_ids=tuple(map(ord, text)), finish_reason=FinishReason.STOP)


def pieces_of(result: Result) -> tuple[Delta, ...]:
    """All but the last character of each generation, by turns."""
    drawn = sorted((p, c.index, t) for c in result.choices for p, t in enumerate(c.token_ids[:-1]))
    return tuple(
        Delta(index=index, choice=choice, text=chr(token), token_ids=(token,))
        for index, (_, choice, token) in enumerate(drawn)
    )


async def work(queue: Queue, worker: str = "echo") -> int:
    """Answer what is waiting; returns how many there were."""
    batch = await queue.claim(worker, 100)
    for claimed in batch:
        await finish(queue, claimed, worker)
    return len(batch)


async def finish(queue: Queue, claimed: Claimed, worker: str = "echo") -> Result:
    """Answer one job; a streamed one after publishing `pieces_of` its result."""
    result = answer(claimed)
    if claimed.stream and result.text:
        await queue.renew(worker, [Renewal(claimed.job_id, claimed.attempt, pieces_of(result))])
    await queue.finish(worker, claimed.attempt, result)
    return result


@asynccontextmanager
async def open_queue(url: str, name: str) -> AsyncIterator[Queue]:
    """The worker's side of a queue."""
    redis = connect(url, queue=name)
    queue = Queue(redis, name)
    try:
        yield queue
    finally:
        await queue.aclose()
        await redis.aclose()


async def _serve(url: str, name: str, stop: threading.Event) -> None:
    async with open_queue(url, name) as queue:
        while not stop.is_set():
            if not await work(queue):
                await queue.wait(0.05)


@contextmanager
def echo_worker(url: str, queue: str) -> Iterator[None]:
    """Serves the queue from another thread, for tests without an event loop."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(url, queue, stop)))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
