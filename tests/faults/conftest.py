"""Servers, the tiny model and what it says undisturbed: made once, because they are the same for all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from tests.e2e.oracle import Answer, Oracle
from tests.faults.factories import LEASE, MODEL, Place, open_place
from tests.faults.invariants import Answers
from tests.faults.kinds_of_server import server_of
from tests.tidemill.servers import Server
from tidemill.jobs import Job


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def answers(model: Path) -> Answers:
    """What each job's answer must be, from an engine with no queue and no other process."""
    oracle = Oracle(model, MODEL)
    known: dict[str, Answer] = {}

    def answer(jobs: Sequence[Job]) -> list[Answer]:
        unknown = {job.digest(): job for job in jobs if job.digest() not in known}
        fresh = oracle.answers(unknown.values())
        known.update((digest, fresh[job.id]) for digest, job in unknown.items())
        return [known[job.digest()] for job in jobs]

    return answer


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """For tests that leave the server in peace; old enough for reclaims."""
    with server_of("valkey") as server:
        server.await_uptime(LEASE)
        yield server


@pytest.fixture
async def place(shared_server: Server, model: Path, tmp_path: Path) -> AsyncIterator[Place]:
    async with open_place(shared_server, model, tmp_path) as opened:
        yield opened
