"""The server loses what it had: nobody hangs, nobody runs hot, and what comes after is served as ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from worker_processes import WorkerProcess

from tests.e2e.polling import until
from tests.faults.factories import PATIENCE, Place, make_jobs, open_own_place
from tests.faults.invariants import Answers, assert_delivered, assert_undisturbed
from tests.faults.kinds_of_server import KINDS
from tests.tidemill.servers import Server
from tidemill.errors import JobUnknown
from tidemill.jobs import Job, JobId, Result

Loss = Callable[[Server], None]
WATCHED = 1.0
"""Seconds."""
CALM = 60
"""Commands of an idle worker in that time, and lines of all logs, at most: a loop that runs hot has
thousands of the ones or hundreds of the others."""


def flush(server: Server) -> None:
    with server.client() as client:
        client.flushall()


def restart(server: Server) -> None:
    server.kill()
    server.start()


@pytest.fixture(params=KINDS)
async def place(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> AsyncIterator[Place]:
    """On a server of its own that keeps nothing."""
    async with open_own_place(request.param, model, tmp_path) as opened:
        yield opened


async def outcome(place: Place, job: Job) -> Result | Exception:
    """What somebody learns who waits for the job, if he learns it at all."""
    try:
        return await place.client.result(job.id, timeout=PATIENCE)
    except JobUnknown as error:
        return error


def lose_amid_work(place: Place, workers: Sequence[WorkerProcess], lose: Loss) -> set[JobId]:
    """Returns whose answers were there by then: nobody records another one meanwhile."""
    for worker in workers:
        worker.freeze()
    answered = place.answered_ids()
    lose(place.server)
    for worker in workers:
        worker.thaw()
    return answered


@pytest.mark.parametrize(
    ("place", "lose"), [*((kind, flush) for kind in KINDS), ("valkey", restart)], indirect=["place"]
)
async def test_everything_is_gone(place: Place, answers: Answers, lose: Loss) -> None:
    """Whoever waits for what had no answer yet, or reads along, is told so; of the others some may be."""
    workers = [await place.start_ready() for _ in range(2)]
    lost = make_jobs(30, "lost", params={"max_tokens": 200})
    await place.submit(*lost)
    waiting = [asyncio.create_task(outcome(place, job)) for job in lost]
    await place.under_way(lost[:4])
    await until(lambda: all(worker.health()["running"] for worker in workers), timeout=PATIENCE)

    answered = lose_amid_work(place, workers, lose)

    assert len(answered) < len(lost) / 2, "nearly all was over before the loss"
    streamed = [job for job in lost if job.stream]
    told = await asyncio.gather(*map(place.deltas, streamed), return_exceptions=True)
    learnt = [*zip(lost, await asyncio.gather(*waiting), strict=True), *zip(streamed, told, strict=True)]
    assert all(isinstance(one, JobUnknown) for job, one in learnt if job.id not in answered)
    for worker in workers:
        await until(lambda: worker.health()["held"] == 0, timeout=PATIENCE)  # noqa: B023  # awaited here
    await assert_calm(place)
    place.forget()
    jobs = make_jobs(12)
    await place.submit(*jobs)
    await assert_undisturbed(place, jobs, answers)
    await assert_delivered(place)


async def assert_calm(place: Place) -> None:
    """Nothing to do, and nothing done but looking now and then."""

    def lines() -> int:
        return sum(len(worker.log.read_text().splitlines()) for worker in place.workers.started)

    with place.redis() as server:
        commands, logged = server.info("stats")["total_commands_processed"], lines()
        await asyncio.sleep(WATCHED)
        commands = server.info("stats")["total_commands_processed"] - commands
    assert commands < CALM * len(place.workers.alive)
    assert lines() - logged < CALM


async def test_time_is_turned_back(model: Path, tmp_path: Path, answers: Answers) -> None:
    """As when a replica takes over that lags behind: jobs that were done are not, checkpoints are shorter."""
    async with open_own_place("valkey", model, tmp_path) as place:
        jobs = make_jobs(16, params={"max_tokens": 300}, stream=False)
        workers = [await place.start_ready(max_attempts=10) for _ in range(2)]
        await place.submit(*jobs)
        await until(lambda: all(worker.health()["running"] for worker in workers), timeout=PATIENCE)
        with place.redis() as client:
            client.save()
        await until(lambda: len(place.answered_ids()) >= 8, timeout=PATIENCE)
        restart(place.server)
        assert len(place.answered_ids()) < 8
        await until(lambda: place.answered_ids() == place.submitted.keys(), timeout=PATIENCE)
        await assert_undisturbed(place, jobs, answers)
        await assert_delivered(place)
