"""Workers are told to stop: at any instant, twice, without a server, and as the first process."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.polling import until
from tests.faults.factories import PATIENCE, Place, make_jobs, open_own_place
from tests.faults.invariants import Answers, assert_delivered, assert_undisturbed
from tests.faults.kinds_of_server import LASTING
from tests.faults.sabotage import Sabotaged
from tidemill.exit_codes import ExitCode

STOPS = 10
MANY = 100
"""Attempts: a claim that was not answered before its worker had to end counts as one."""
HARMLESS = (ExitCode.OK, -signal.SIGTERM)
"""How a worker may end that is told to before its first line of code has run, and after that."""


async def test_at_random_instants(place: Place, answers: Answers) -> None:
    """A worker ends well whenever it is told to; one after the other works on what there is."""
    dice = random.Random(3)
    jobs = make_jobs(30, params={"max_tokens": 80})
    await place.submit(*jobs)
    for _ in range(STOPS):
        worker = place.start(grace_period=dice.choice([0, 0.2]), max_attempts=MANY)
        await asyncio.sleep(dice.uniform(0.0, 0.8))
        worker.terminate()
        assert await asyncio.to_thread(worker.wait) in HARMLESS, worker.log.read_text()
    await place.start_ready(max_attempts=MANY)
    await assert_undisturbed(place, jobs, answers)
    await assert_delivered(place)


async def test_twice(place: Place, answers: Answers) -> None:
    """The second signal takes the patience away that the first one has left."""
    jobs = make_jobs(4, params={"max_tokens": 400})
    worker = await place.start_ready(grace_period=PATIENCE)
    await place.submit(*jobs)
    await place.under_way(jobs, worker)
    worker.terminate()
    await until(lambda: "event=draining" in worker.log.read_text(), timeout=PATIENCE)
    await place.under_way(jobs, worker, tokens=20)
    worker.terminate()
    assert await asyncio.to_thread(worker.wait) == ExitCode.OK
    views = [await place.client.status(job.id) for job in jobs]
    assert {(view.state, view.attempt, view.failures) for view in views} == {("waiting", 1, 0)}
    await place.start_ready()
    await assert_undisturbed(place, jobs, answers)
    await assert_delivered(place)


async def test_with_the_server_down(model: Path, tmp_path: Path, answers: Answers) -> None:
    """It does not wait for what may never come back, and says that it leaves jobs behind."""
    async with open_own_place("redis", model, tmp_path, *LASTING) as place:
        jobs = make_jobs(6, params={"max_tokens": 300})
        worker = await place.start_ready(grace_period=0.1)
        await place.submit(*jobs)
        await place.under_way(jobs, worker)
        place.server.kill()
        worker.terminate()
        assert await asyncio.to_thread(worker.wait) == ExitCode.FAILED
        place.server.start()
        await place.start_ready()
        await assert_undisturbed(place, jobs, answers)
        await assert_delivered(place, errors=["event=not_handed_back"])


async def test_as_the_first_process(place: Place, answers: Answers) -> None:
    """In a container nobody else answers for the signal: without a handler it would do nothing."""
    jobs = make_jobs(4, params={"max_tokens": 300})
    worker = place.start(Sabotaged(first_process=True), grace_period=0)
    try:
        await worker.ready()
    except RuntimeError as error:
        if "PermissionError" not in str(error):
            raise
        pytest.skip("this machine lets nobody make a namespace of processes")
    await place.submit(*jobs)
    await place.under_way(jobs)
    (inner,) = psutil.Process(worker.pid).children()
    inner.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait) == ExitCode.OK
    await place.start_ready()
    await assert_undisturbed(place, jobs, answers)
    await assert_delivered(place)
