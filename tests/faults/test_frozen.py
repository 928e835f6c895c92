"""Workers that were away longer than their lease come back, and have nothing more to say."""

from __future__ import annotations

import psutil
from worker_processes import WorkerProcess

from tests.e2e.polling import until
from tests.faults.factories import PATIENCE, Place, make_job, make_jobs
from tests.faults.invariants import Answers, assert_delivered, assert_undisturbed
from tests.faults.sabotage import FREEZES_BEFORE_FINISH, Sabotaged
from tidemill.moves import JobState

NAME = "twin"


def says(worker: WorkerProcess, event: str) -> bool:
    return f"event={event}" in worker.log.read_text()


async def test_its_renewals_fail(place: Place, answers: Answers) -> None:
    """Frozen in mid-generation; it learns at its next renewal that all is lost, and lets go of it."""
    jobs = make_jobs(6, params={"max_tokens": 300})
    zombie = await place.start_ready()
    await place.submit(*jobs)
    await place.under_way(jobs, zombie)
    zombie.freeze()
    successor = await place.start_ready()
    results = await assert_undisturbed(place, jobs, answers)
    assert all(successor.holds(result.worker) for result in results)

    zombie.thaw()

    await until(lambda: zombie.log.read_text().count("event=lease_lost") == len(jobs), timeout=PATIENCE)
    await assert_delivered(place)


async def test_its_finish_fails(place: Place, answers: Answers) -> None:
    """Frozen with its result ready, in the very moment in which it would have been recorded."""
    job = make_job(FREEZES_BEFORE_FINISH, params={"max_tokens": 20})
    zombie = await place.start_ready(log_level="debug")
    await place.submit(job)
    status = psutil.Process(zombie.pid).status
    await until(lambda: status() == psutil.STATUS_STOPPED, timeout=PATIENCE)
    successor = await place.start_ready(Sabotaged(fatal=False))
    (result,) = await assert_undisturbed(place, [job], answers)
    assert successor.holds(result.worker)

    zombie.thaw()

    await until(lambda: says(zombie, "result_dropped"), timeout=PATIENCE)
    await assert_delivered(place)


async def test_a_namesake_is_not_taken_for_it(place: Place, answers: Answers) -> None:
    """Two processes hold leases under one name: what tells them apart is the attempt."""
    successor = await place.start_ready(Sabotaged(name=NAME))
    successor.freeze()  # so that these go to the other one
    zombie = await place.start_ready(Sabotaged(name=NAME))
    contested = make_jobs(4, params={"max_tokens": 500})
    await place.submit(*contested)
    await place.under_way(contested)
    successor.thaw()
    others = make_jobs(8, params={"max_tokens": 100})
    await place.submit(*others)
    await until(lambda: successor.health()["running"], timeout=PATIENCE)
    zombie.freeze()

    async def change_hands() -> bool:
        views = [await place.client.status(job.id) for job in contested]
        assert {(view.state, view.worker) for view in views} == {(JobState.RUNNING, NAME)}
        return all(view.attempt >= 2 for view in views)

    await until(change_hands, timeout=PATIENCE)
    zombie.thaw()

    await until(lambda: zombie.log.read_text().count("event=lease_lost") >= len(contested), timeout=PATIENCE)
    results = await assert_undisturbed(place, contested, answers)
    assert all(successor.holds(result.worker) for result in results)
    await assert_undisturbed(place, others, answers)
    await assert_delivered(place)
