"""The server loses what it had: nobody hangs, nobody runs hot, and what comes after is served as ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.e2e.polling import until
from tests.faults.conftest import Answers
from tests.faults.factories import PATIENCE, Place, make_jobs, open_place
from tests.faults.invariants import assert_delivered, assert_undisturbed
from tests.faults.kinds_of_server import KINDS, server_of
from tests.tidemill.servers import Server
from tidemill.errors import JobUnknown
from tidemill.jobs import Job, Result

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
    with server_of(request.param) as server:
        async with open_place(server, model, tmp_path) as opened:
            yield opened


async def outcome(place: Place, job: Job) -> Result | Exception:
    """What somebody learns who waits for the job, if he learns it at all."""
    try:
        return await place.client.result(job.id, timeout=PATIENCE)
    except JobUnknown as error:
        return error


@pytest.mark.parametrize(
    ("place", "lose"), [*((kind, flush) for kind in KINDS), ("valkey", restart)], indirect=["place"]
)
async def test_everything_is_gone(place: Place, answers: Answers, lose: Loss) -> None:
    workers = [await place.start_ready() for _ in range(2)]
    lost = make_jobs(30, "lost", params={"max_tokens": 200})
    await place.submit(*lost)
    await place.under_way(lost[:4])
    waiting = [asyncio.create_task(outcome(place, job)) for job in lost]
    await until(lambda: all(worker.health()["running"] for worker in workers), timeout=PATIENCE)

    lose(place.server)

    learnt = await asyncio.gather(*waiting)
    assert sum(isinstance(one, JobUnknown) for one in learnt) >= len(lost) / 2
    for job in lost:
        if job.stream:
            with pytest.raises(JobUnknown):
                await place.deltas(job)
    for worker in workers:
        await until(lambda: worker.health()["held"] == 0, timeout=PATIENCE)  # noqa: B023  # awaited here
    await assert_calm(place)
    place.forget()
    jobs = make_jobs(12)
    await place.submit(*jobs)
    await assert_undisturbed(place, jobs, answers(jobs))
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
    with server_of("valkey") as server:
        async with open_place(server, model, tmp_path) as place:
            jobs = make_jobs(16, params={"max_tokens": 100}, stream=False)
            workers = [await place.start_ready(max_attempts=10) for _ in range(2)]
            await place.submit(*jobs)
            await until(lambda: all(worker.health()["running"] for worker in workers), timeout=PATIENCE)
            with place.redis() as client:
                client.save()
            await until(lambda: len(place.answered_ids()) >= 8, timeout=PATIENCE)
            restart(server)
            assert len(place.answered_ids()) < 8
            await until(lambda: place.answered_ids() == place.submitted.keys(), timeout=PATIENCE)
            await assert_undisturbed(place, jobs, answers(jobs))
            await assert_delivered(place)
