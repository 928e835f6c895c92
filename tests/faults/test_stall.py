"""An engine that makes no progress: its process says so and ends, and others do its work."""

from __future__ import annotations

import asyncio

from tests.faults.factories import Place, make_job, make_jobs
from tests.faults.invariants import Answers, assert_delivered, assert_undisturbed
from tests.faults.sabotage import HANGS_IN_STEP, Sabotaged
from tidemill.exit_codes import ExitCode

STALL_TIMEOUT = 3.0
"""Seconds: no step takes so long that nobody has made hang."""


async def test_a_step_hangs(place: Place, answers: Answers) -> None:
    jobs = [*make_jobs(4, params={"max_tokens": 150}), make_job(HANGS_IN_STEP)]
    worker = await place.start_ready(stall_timeout=STALL_TIMEOUT)
    await place.submit(*jobs)

    assert await asyncio.to_thread(worker.wait) == ExitCode.STALLED

    log = worker.log.read_text()
    assert "event=engine_stalled" in log
    assert "in _hang" in log, "no stack tells where it hangs"
    await place.start_ready(Sabotaged(fatal=False))
    await assert_undisturbed(place, jobs, answers)
    await assert_delivered(place, errors=["event=engine_stalled"])
