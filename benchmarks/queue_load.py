"""A producer and a worker that computes nothing, for measuring what the queue between them costs."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Self

from servers import OwnServer

from tidemill import Job, SamplingParams
from tidemill.client import Client
from tidemill.connection import connect
from tidemill.jobs import Delta, FinishReason, JobId, Priority, Result, Status, Usage
from tidemill.moves import Claimed, FinishOutcome, Renewal
from tidemill.queue import Queue
from tidemill_worker.intake import BITE
from tidemill_worker.recorder import CONCURRENCY

PROMPT_CHARACTERS = 1000
"""Some 250 tokens, as in a summary of a page."""
LEASES = 500
PROMPT_TOKENS, OUTPUT_TOKENS, CHECKPOINT_TOKENS = 250, 60, 8
WORKER = "bench-worker"
TEXT = "\n\n".join(topics[name] for name in sorted(topics))


@dataclass(frozen=True)
class Standing:
    """What a line of waiting jobs costs."""

    waiting: int
    bytes_in_all: float
    """Of the server's memory, for each job."""
    bytes_beyond_payload: float
    claim_ms: float
    """One call for one job, median."""
    depth_ms: float


class Bench:
    """Both sides of one queue."""

    def __init__(self, server: OwnServer, client: Client, queue: Queue) -> None:
        self._server = server
        self._client = client
        self._queue = queue
        self._dice = random.Random(0)

    @classmethod
    @asynccontextmanager
    async def on(cls, server: OwnServer, name: str) -> AsyncIterator[Self]:
        """A queue of that name, the only one on its server."""
        with server.client() as own:
            own.flushall()
        async with Client(server.url, queue=name) as client, connect(server.url) as redis:
            queue = Queue(redis, name)
            yield cls(server, client, queue)
            await queue.aclose()

    def make_jobs(self, count: int, *, start: int = 0) -> list[Job]:
        """Jobs as a producer has them, checked already; each with a prompt of its own."""
        pattern = Job(
            prompt="-", params=SamplingParams(max_tokens=256, temperature=0.7), priority=Priority.NORMAL
        )
        places = (self._dice.randrange(len(TEXT) - PROMPT_CHARACTERS) for _ in range(count))
        return [
            pattern.model_copy(
                update={
                    "id": JobId(f"document-{number:09}"),
                    "prompt": TEXT[place : place + PROMPT_CHARACTERS],
                    "metadata": {"document": f"manual/{number:09}.txt"},
                }
            )
            for number, place in enumerate(places, start)
        ]

    async def submit_one_by_one(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            await self._client.submit(job)

    async def submit_many(self, jobs: Sequence[Job]) -> None:
        async for _ in self._client.submit_many(jobs):
            pass

    async def claim(self, count: int) -> list[Claimed]:
        """Claim so many, in bites as a worker does."""
        held: list[Claimed] = []
        while len(held) < count:
            held += await self._queue.claim(WORKER, BITE)
        return held

    async def renew(self, held: Sequence[Claimed], step: int) -> float:
        """Renew all these leases in one call, with what `step` earlier ones left to tell; its seconds."""
        renewals = renewals_of(held, step)
        start = time.perf_counter()
        outcome = await self._queue.renew(WORKER, renewals)
        seconds = time.perf_counter() - start
        if outcome.lost:
            raise SystemExit(f"{len(outcome.lost)} leases were lost: this machine is too slow for them")
        return seconds

    async def finish(self, held: Sequence[Claimed]) -> None:
        """Record results of ordinary size, as many at once as a worker does."""
        line = iter(held)

        async def record() -> None:
            for one in line:
                outcome = await self._queue.finish(WORKER, one.attempt, result_of(one))
                if outcome is not FinishOutcome.OK:
                    raise SystemExit(f"job {one.job_id} could not be finished: {outcome}")

        await asyncio.gather(*(record() for _ in range(CONCURRENCY)))

    def used_memory(self) -> int:
        """Bytes that the server has allocated."""
        with self._server.client() as client:
            used: int = client.info("memory")["used_memory"]
        return used

    async def claim_one(self) -> object:
        return await self._queue.claim(WORKER, 1)

    async def depth(self) -> object:
        return await self._client.depth()


def renewals_of(held: Sequence[Claimed], step: int) -> list[Renewal]:
    """A small checkpoint of each job, the one after `step` others."""
    delta = Delta(
        index=step * CHECKPOINT_TOKENS,
        text=TEXT[: 4 * CHECKPOINT_TOKENS],
        token_ids=tuple(range(1000, 1000 + CHECKPOINT_TOKENS)),
    )
    return [Renewal(one.job_id, one.attempt, (delta,), PROMPT_TOKENS) for one in held]


def result_of(claimed: Claimed) -> Result:
    """An answer of `OUTPUT_TOKENS`."""
    return Result(
        id=claimed.job_id,
        status=Status.SUCCEEDED,
        text=TEXT[: 4 * OUTPUT_TOKENS],
        token_ids=tuple(range(1000, 1000 + OUTPUT_TOKENS)),
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=OUTPUT_TOKENS),
        attempts=claimed.attempt,
        worker=WORKER,
    )


async def standing(bench: Bench, waiting: int, *, repeats: int = 100) -> Standing:
    """Let so many jobs wait, and look at what that costs."""
    jobs = bench.make_jobs(waiting)
    payload = statistics.mean(len(job.to_wire().encode()) for job in jobs)
    before = bench.used_memory()
    await bench.submit_many(jobs)
    in_all = (bench.used_memory() - before) / waiting
    depth = await _median_ms(bench.depth, repeats)
    claim = await _median_ms(bench.claim_one, repeats)
    return Standing(waiting, in_all, in_all - payload, claim, depth)


async def _median_ms(move: Callable[[], Awaitable[object]], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        await move()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)
