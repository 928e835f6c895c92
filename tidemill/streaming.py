"""Reading a job's generation along, from its beginning to its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from functools import partial

from tidemill.answers import RecordedAnswers
from tidemill.jobs import Delta, JobId, Result
from tidemill.patience import Patience
from tidemill.queue import Queue
from tidemill.told import Told

BLOCK = 1.0
"""Seconds that one read waits for the next piece."""
DELTA_COUNT = 100
"""Pieces in one reply: the most that are held for a reader who is slow."""


class DeltaReader:
    """Reads along with jobs of one queue."""

    def __init__(self, queue: Queue, answers: RecordedAnswers, patience: Patience) -> None:
        self._queue = queue
        self._answers = answers
        self._patience = patience

    async def deltas(self, job_id: JobId, *, timeout: float | None) -> AsyncGenerator[Delta, None]:
        """What `Client.stream` promises. The first look has no patience: it tells whether Redis is there."""
        clock = asyncio.get_running_loop().time
        give_up = math.inf if timeout is None else clock() + timeout
        ride_out = partial(self._patience.ride_out, until=give_up)
        look = partial(self._answer, job_id)
        answer, cursor, told = await look(), "0", Told()
        while True:
            is_done = answer is not None
            block = 0.0 if is_done else max(0.0, min(BLOCK, give_up - clock()))
            page = await ride_out(partial(self._queue.deltas, job_id, cursor, count=DELTA_COUNT, block=block))
            cursor = page.cursor
            for delta in filter(told.take, page.deltas):
                yield delta
            if page.restarted:
                told.begin_anew()
            if not is_done and (page.ended or not page.deltas):
                answer = await ride_out(look)
            if answer is not None and (page.ended or (is_done and not page.deltas)):
                break
            if answer is None and clock() >= give_up:
                raise TimeoutError(f"job {job_id} has not ended after {timeout:g} s")
        for rest in told.rest(answer):
            yield rest

    async def _answer(self, job_id: JobId) -> Result | None:
        (answer,) = await self._answers.look([job_id])
        if isinstance(answer, Exception):
            raise answer
        return answer
