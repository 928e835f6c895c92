"""Submitting in batches, and waiting for room where the queue or a tenant is at its limit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import TypeVar

from tidemill.backoff import pauses
from tidemill.completion import each
from tidemill.errors import QueueFull, QueueUnavailable, TidemillError
from tidemill.jobs import Job, JobId
from tidemill.patience import Patience
from tidemill.refusals import is_out_of_memory

T = TypeVar("T")

BATCH = 500
"""Jobs of one pipelined round trip."""
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
"""Seconds between two tries at a queue that has no room."""

Outcome = JobId | TidemillError
"""The id of an accepted job, or why it was refused."""
Settled = Sequence[tuple[int, Outcome]]
"""What became of some jobs of a batch, each by its place in the batch."""
Submit = Callable[[Sequence[Job]], Awaitable[Sequence[Outcome]]]
OnError = Callable[[Job, TidemillError], None]


class Submission:
    """Submits batches one after another; what finds no room is tried again, in its order.

    Where a tenant's jobs found no room, its next one is tried alone, then twice as many each time as long
    as all of them are accepted: a full queue is asked little, and one that empties fills quickly. By
    tenant, because the limit that was met may be of one tenant only.

    Absences of Redis are ridden out in that time, as long as patience allows. A server that is out of memory
    has no room.
    """

    def __init__(self, submit: Submit, *, patience: Patience, wait_for_room: float) -> None:
        """`submit` makes one try; `wait_for_room` is how many seconds each batch may take.

        Raises:
            ValueError: `wait_for_room` is below 0, or no number.
        """
        if not wait_for_room >= 0:
            raise ValueError(f"wait_for_room must be at least 0 s, got {wait_for_room}")
        self._submit = submit
        self._patience = patience
        self._wait = wait_for_room
        self._shares: dict[str, int] = {}

    async def settle(self, jobs: Sequence[Job]) -> AsyncGenerator[Settled, None]:
        """What becomes of `jobs`, in parts as it is decided; at the end, those that never found room.

        Raises:
            QueueUnavailable: Redis was away, and still when patience or the time for the batch was over; or
                it was out of memory all that time.
        """
        clock = asyncio.get_running_loop().time
        give_up = clock() + self._wait
        waiting = dict(enumerate(jobs))
        pausing = pauses(FIRST_PAUSE, LONGEST_PAUSE)
        while waiting:
            is_last = clock() >= give_up
            tried = waiting if is_last else self._next_of(waiting)
            settled = await self._try(tried, give_up, is_last=is_last)
            for place, _ in settled:
                del waiting[place]
            if settled:
                pausing = pauses(FIRST_PAUSE, LONGEST_PAUSE)
                yield settled
            else:
                await asyncio.sleep(min(next(pausing), give_up - clock()))

    async def _try(self, jobs: Mapping[int, Job], until: float, *, is_last: bool) -> Settled:
        """What one try decides of `jobs`, by place: of those without room nothing, unless it is the last."""
        submit = partial(self._submit, list(jobs.values()))
        try:
            decided = await self._patience.ride_out(submit, until=until)
        except QueueUnavailable as refusal:
            if is_last or not is_out_of_memory(refusal):
                raise
            return []
        outcomes = list(zip(jobs, decided, strict=True))
        self._learn(jobs, outcomes)
        return [pair for pair in outcomes if is_last or not isinstance(pair[1], QueueFull)]

    def _next_of(self, waiting: Mapping[int, Job]) -> Mapping[int, Job]:
        """Each tenant's first jobs, by place: all of them, or its share."""
        taken: Counter[str] = Counter()
        chosen = {}
        for place, job in waiting.items():
            if taken[job.tenant] < self._shares.get(job.tenant, len(waiting)):
                taken[job.tenant] += 1
                chosen[place] = job
        return chosen

    def _learn(self, jobs: Mapping[int, Job], outcomes: Settled) -> None:
        full = {jobs[place].tenant for place, outcome in outcomes if isinstance(outcome, QueueFull)}
        for tenant in {jobs[place].tenant for place, _ in outcomes} & self._shares.keys():
            self._shares[tenant] *= 2
            if self._shares[tenant] > BATCH:
                del self._shares[tenant]
        self._shares.update(dict.fromkeys(full, 1))


def accepted(jobs: Sequence[Job], settled: Settled, on_error: OnError | None) -> Iterator[JobId]:
    """The ids among the outcomes; refusals go to `on_error`, or the first is raised at the end."""
    refusals: list[TidemillError] = []
    for place, outcome in settled:
        if not isinstance(outcome, TidemillError):
            yield outcome
        elif on_error is not None:
            on_error(jobs[place], outcome)
        else:
            refusals.append(outcome)
    if refusals:
        raise refusals[0]


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items, the last one possibly shorter."""
    chunk: list[T] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def abatched(items: Iterable[T] | AsyncIterable[T], size: int) -> AsyncIterator[list[T]]:
    """The same of either kind of iterable."""
    chunk: list[T] = []
    async for item in each(items):
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
