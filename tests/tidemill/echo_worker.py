"""A worker without a model, for tests of those who submit: it answers a prompt with the prompt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tidemill.connection import connect
from tidemill.errors import ErrorCode
from tidemill.jobs import Delta, ErrorInfo, FinishReason, Job, Result, Status, Usage
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
    return Result(
        id=job.id,
        status=Status.SUCCEEDED,
        text=text,
        token_ids=tuple(map(ord, text)),
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=len(text), completion_tokens=len(text)),
        attempts=claimed.attempt,
        metadata=job.metadata,
    )


async def work(queue: Queue, worker: str = "echo") -> int:
    """Answer what is waiting; returns how many there were."""
    batch = await queue.claim(worker, 100)
    for claimed in batch:
        await finish(queue, claimed, worker)
    return len(batch)


async def finish(queue: Queue, claimed: Claimed, worker: str = "echo") -> Result:
    """Answer one job; a streamed one after publishing all but its last character."""
    result = answer(claimed)
    if claimed.stream and result.text:
        pieces = deltas(result.text)[:-1]
        await queue.renew(worker, [Renewal(claimed.job_id, claimed.attempt, pieces)])
    await queue.finish(worker, claimed.attempt, result)
    return result


@asynccontextmanager
async def open_queue(url: str, name: str) -> AsyncIterator[Queue]:
    """The worker's side of a queue."""
    redis = connect(url)
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
