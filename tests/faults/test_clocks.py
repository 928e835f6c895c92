"""Workers whose clocks are minutes apart: what decides about leases and deadlines is the server's."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from worker_processes import WorkerProcess

from tests.faults.factories import LEASE, Place, make_job, make_jobs
from tests.faults.invariants import Answers, assert_delivered, assert_undisturbed
from tests.faults.sabotage import Sabotaged
from tidemill.jobs import Status

MINUTES = 600.0


def written_at(worker: WorkerProcess) -> datetime:
    """When it began to serve, as it would have it."""
    told = re.search(r"timestamp=(\S+) .*event=serving", worker.log.read_text())
    assert told is not None
    return datetime.fromisoformat(told[1])


async def test_jobs_change_hands_as_if_they_agreed(place: Place, answers: Answers) -> None:
    """From the one that is ahead to the one that is behind: a lease and a deadline mean the same to both."""
    ahead = await place.start_ready(Sabotaged(clock=MINUTES))
    jobs = make_jobs(6, params={"max_tokens": 200}, deadline=MINUTES / 2)
    late = make_job("late", params={"max_tokens": 1500}, deadline=3 * LEASE)
    await place.submit(*jobs, late)
    await place.under_way([*jobs, late], ahead)
    behind = await place.start_ready(Sabotaged(clock=-MINUTES))
    assert abs(written_at(ahead) - datetime.now(UTC)) > timedelta(seconds=MINUTES / 2)
    ahead.kill()

    results = await assert_undisturbed(place, jobs, answers)

    assert all(behind.holds(result.worker) for result in results)
    (result,) = await place.results([late])
    assert result.status is Status.EXPIRED
    await assert_delivered(place)
