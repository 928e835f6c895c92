"""Workers are killed: whatever the instant, every job is answered once, as if nothing had been."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal

from tests.faults.factories import Place, make_job, make_jobs
from tests.faults.invariants import Answers, assert_delivered, assert_undisturbed

KILLS = 12
LENGTH = 400
"""Tokens."""


async def test_kills_at_random_instants(place: Place, answers: Answers) -> None:
    """Three workers under load; again and again one of them is killed, and replaced."""
    dice = random.Random(7)
    for _ in range(3):
        await place.start_ready(max_attempts=100)
    jobs = make_jobs(60, params={"max_tokens": 160})
    await place.submit(*jobs)
    kills = 0
    while kills < KILLS and len(place.answered_ids()) < len(jobs):
        await asyncio.sleep(dice.uniform(0.1, 0.5))
        dice.choice(place.workers.alive).kill()
        kills += 1
        place.start(max_attempts=100)
    assert kills >= KILLS / 2, "all was over too early"
    await assert_undisturbed(place, jobs, answers)
    await assert_delivered(place)
    killed = [worker for worker in place.workers.started if not worker.is_alive]
    assert [worker.wait() for worker in killed] == kills * [-signal.SIGKILL]


async def test_a_generation_goes_on_where_it_was(place: Place, answers: Answers) -> None:
    """The second worker generates what the last checkpoint lacks, and nothing else."""
    kinds = itertools.product((0.0, 0.8), (True, False))
    jobs = [
        make_job(
            number=number, stream=stream, params={"max_tokens": LENGTH, "temperature": temperature, "n": 1}
        )
        for number, (temperature, stream) in enumerate(kinds)
    ]
    victim = await place.start_ready()
    await place.submit(*jobs)
    await place.under_way(jobs, victim, tokens=80)
    victim.kill()
    views = [await place.client.status(job.id) for job in jobs]
    checkpointed = sum(view.checkpointed_tokens for view in views)
    survivor = await place.start_ready()

    results = await assert_undisturbed(place, jobs, answers)

    assert all(result.attempts == 2 and survivor.holds(result.worker) for result in results)
    assert survivor.metric("tidemill_generation_tokens_total") == 4 * LENGTH - checkpointed
    await assert_delivered(place)
