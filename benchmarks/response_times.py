"""How long jobs take from submission to result, and how much load a queue sustains at a bound on that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np

from tidemill import Job, Result
from tidemill.client import Client


@dataclass(frozen=True)
class Offered:
    """What came of jobs that were offered to a queue.

    Attributes:
        response_times: seconds from when each job was due to its result, in the order of submission.
        seconds: from the first submission to the last result.
        num_output_tokens: generated tokens.
        num_useful_tokens: positions that any engine has to compute for them: all but the last token
            of each.
    """

    response_times: tuple[float, ...]
    seconds: float
    num_output_tokens: int
    num_useful_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def jobs_per_second(self) -> float:
        return len(self.response_times) / self.seconds

    @property
    def mean(self) -> float:
        return float(np.mean(self.response_times))

    @property
    def p99(self) -> float:
        """The 99th percentile, interpolated between the two nearest."""
        return float(np.percentile(self.response_times, 99))


async def offer(client: Client, jobs: Sequence[Job], arrivals: Sequence[float]) -> Offered:
    """Submit each job when it is due, whatever has become of those before it, and wait for all results.

    Args:
        client: where to; no job may have been submitted before.
        jobs: at least one.
        arrivals: when each is due, in seconds from now, ascending. Those due together go in one trip.

    Raises:
        JobFailed: if one of them does.
        TidemillError: if one is refused.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    waiting: list[asyncio.Task[tuple[Result, float]]] = []

    async def answer(job: Job, due: float) -> tuple[Result, float]:
        result = await client.result(job.id)
        return result.raise_for_status(), loop.time() - start - due

    async with asyncio.TaskGroup() as group:
        for due, together in groupby(zip(jobs, arrivals, strict=True), key=itemgetter(1)):
            await asyncio.sleep(start + due - loop.time())
            batch = [job for job, _ in together]
            for outcome in await client.submit_batch(batch):
                if isinstance(outcome, Exception):
                    raise outcome
            waiting += [group.create_task(answer(job, due)) for job in batch]
    seconds = loop.time() - start
    answers = [task.result() for task in waiting]
    return Offered(
        response_times=tuple(response_time for _, response_time in answers),
        seconds=seconds,
        num_output_tokens=sum(result.usage.completion_tokens for result, _ in answers),
        num_useful_tokens=sum(result.usage.total_tokens - 1 for result, _ in answers),
    )


def poisson_arrivals(rate: float, count: int, *, seed: int = 0) -> list[float]:
    """Draw when `count` jobs arrive, in seconds, `rate` a second in the mean.

    The same seed gives the same pattern at every rate, faster or slower.
    """
    dice = random.Random(seed)
    return list(accumulate(dice.expovariate(1.0) / rate for _ in range(count)))


def sustained_load(points: Sequence[tuple[float, float]], bound: float) -> float:
    """The load up to which response times stay within `bound`, by a straight line between two points.

    Args:
        points: (load, response time), the loads ascending; the first is the unloaded queue's.
        bound: in the unit of the response times.

    Returns:
        The load where they first pass the bound; the highest offered if they never do.

    Raises:
        ValueError: if the first is over the bound already.
    """
    load, response_time = points[0]
    if response_time > bound:
        raise ValueError(f"bound is {bound:g}, the unloaded queue's response time {response_time:g}")
    for next_load, next_time in points[1:]:
        if next_time > bound:
            return load + (next_load - load) * (bound - response_time) / (next_time - response_time)
        load, response_time = next_load, next_time
    return load
