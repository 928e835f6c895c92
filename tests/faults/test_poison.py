"""A job that brings down every worker is tried alone, then buried; its neighbours get their answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.faults.factories import Place, make_job, make_jobs
from tests.faults.invariants import Answers, assert_delivered, assert_undisturbed
from tests.faults.sabotage import KILLS_IN_PREPARATION, KILLS_IN_STEP
from tidemill.errors import ErrorCode
from tidemill.jobs import Status

MAX_ATTEMPTS = 3
NUM_WORKERS = 2


@contextlib.asynccontextmanager
async def supervised(place: Place, count: int) -> AsyncIterator[None]:
    """So many workers: in the place of each that ends another one is started."""

    async def supervise() -> None:
        while True:
            while len(place.workers.alive) < count:
                place.start(max_attempts=MAX_ATTEMPTS, max_num_seqs=16)
            await asyncio.sleep(0.05)

    supervisor = asyncio.create_task(supervise())
    try:
        yield
    finally:
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)


@pytest.mark.parametrize("fate", [KILLS_IN_PREPARATION, KILLS_IN_STEP])
async def test_it_is_buried_alone(place: Place, answers: Answers, fate: str) -> None:
    neighbours, poison = make_jobs(15, params={"max_tokens": 100}), make_job(fate)
    await place.submit(*neighbours[:7], poison, *neighbours[7:])
    async with supervised(place, NUM_WORKERS):
        (result,) = await place.results([poison])
        await assert_undisturbed(place, neighbours, answers)
        assert (result.status, result.attempts) == (Status.FAILED, MAX_ATTEMPTS)
        assert result.error is not None
        assert result.error.code is ErrorCode.ATTEMPTS_EXHAUSTED
    await assert_delivered(place, buried=[poison.id])
    deaths = [worker for worker in place.workers.started if not worker.is_alive]
    assert len(deaths) == MAX_ATTEMPTS
