"""The stages of its life at which a job may be cancelled, or late: each function brings one there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from worker_processes import WorkerProcess

from tests.e2e.polling import until
from tests.faults.factories import PATIENCE, Place, make_job
from tests.faults.sabotage import Sabotaged
from tests.tidemill.factories import sibling
from tidemill.jobs import Job, Priority
from tidemill.moves import Claimed, JobState, Renewal

LONG = 600
"""Tokens: at `SLOWLY` they take much longer than whoever has to be at some stage before their end."""
SLOWLY = Sabotaged(step_seconds=0.03)
BRIEF = 0.1
LONGER_THAN_ANY_TEST = 300.0
TINY_CACHE = 0.0005
"""GiB: the KV of 1,048 tokens of the tiny model."""


@dataclass(frozen=True)
class Stage:
    """A job that is where it should be."""

    job: Job
    worker: WorkerProcess | None = None
    """Who holds it, if anybody does."""
    generated: bool = False
    """Whether there is some of its text."""
    rival: Job | None = None
    """What it makes way for; of no use once the test is over."""


Reach = Callable[[Place, float | None], Awaitable[Stage]]
"""Submits a job with a deadline, or without one, and returns when it is at that stage."""


async def waiting(place: Place, deadline: float | None) -> Stage:
    """For a worker, of which there is none."""
    job = make_job(deadline=deadline)
    await place.submit(job)
    return Stage(job)


async def delayed(place: Place, deadline: float | None) -> Stage:
    """In backoff, after two workers that took it were never heard of again."""
    job = make_job(deadline=deadline)
    await place.submit(job)
    backoff = {"backoff": LONGER_THAN_ANY_TEST, "max_backoff": LONGER_THAN_ANY_TEST}
    doomed = sibling(place.queue, place.connection, lease=BRIEF, **backoff)
    await doomed.claim("doomed", 1)

    async def is_delayed() -> bool:
        await doomed.reclaim("doomed too", 1)
        return (await place.client.status(job.id)).state is JobState.DELAYED

    await until(is_delayed, timeout=PATIENCE)
    await place.start_ready()
    return Stage(job)


async def running(place: Place, deadline: float | None) -> Stage:
    worker = await place.start_ready(SLOWLY)
    job = make_job(params={"max_tokens": LONG}, stream=False, deadline=deadline)
    await place.submit(job)
    await until(lambda: worker.metric("tidemill_generation_tokens_total") >= 5, timeout=PATIENCE)
    return Stage(job, worker, generated=True)


async def in_prefill(place: Place, deadline: float | None) -> Stage:
    """Amid a prompt that takes hundreds of steps."""
    worker = await place.start_ready(SLOWLY, max_num_seqs=4, max_num_batched_tokens=4)
    job = make_job(prompt_token_ids=(42,) * 1600, stream=False, deadline=deadline)
    await place.submit(job)
    await until(lambda: worker.metric("tidemill_kv_cache_usage_ratio") > 0, timeout=PATIENCE)
    return Stage(job, worker)


async def preempted(place: Place, deadline: float | None, **flags: object) -> Stage:
    """Out of the running batch, for the sake of a job of higher priority that needs its memory."""
    worker = await place.start_ready(SLOWLY, kv_cache_memory=TINY_CACHE, **flags)
    job = make_job(
        prompt_token_ids=(42,) * 400,
        params={"max_tokens": LONG},
        priority=Priority.LOW,
        deadline=deadline,
    )
    await place.submit(job)
    await place.under_way([job], worker)
    rival = make_job(
        "rival", prompt_token_ids=(43,) * 600, params={"max_tokens": 400}, priority=Priority.HIGH
    )
    await place.submit(rival)

    def is_out() -> bool:
        health = worker.health()
        preemptions = worker.metric("tidemill_preemptions_total")
        return preemptions > 0 and (health["running"], health["waiting"]) == (1, 1)

    await until(is_out, timeout=PATIENCE)
    return Stage(job, worker, generated=True, rival=rival)


swapped = partial(preempted, swap_space=0.01, preemption_mode="swap")
"""The same; its blocks are kept in the swap space."""


async def draining(place: Place, deadline: float | None) -> Stage:
    """Running on a worker that was told to stop, and has the patience to let it end."""
    worker = await place.start_ready(SLOWLY, grace_period=LONGER_THAN_ANY_TEST)
    job = make_job(params={"max_tokens": LONG}, deadline=deadline)
    await place.submit(job)
    await place.under_way([job], worker)
    worker.terminate()
    await until(lambda: "event=draining" in worker.log.read_text(), timeout=PATIENCE)
    return Stage(job, worker, generated=True)


async def aside(place: Place, deadline: float | None) -> Stage:
    """Held by a worker that lets it wait until it is alone, because another one was lost with it."""
    worker = await place.start_ready(SLOWLY, max_attempts=2)
    worker.freeze()
    job = make_job(deadline=deadline)
    await place.submit(job)
    lost = sibling(place.queue, place.connection, lease=BRIEF, max_attempts=2)
    await lost.claim("lost", 1)
    taken: list[Claimed] = []

    async def change_hands() -> bool:
        taken.extend(await lost.reclaim("lost too", 1))
        return bool(taken)

    await until(change_hands, timeout=PATIENCE)
    await lost.release("lost too", [Renewal(job.id, taken[0].attempt)])
    rival = make_job("rival", params={"max_tokens": LONG}, priority=Priority.HIGH)
    await place.submit(rival)
    worker.thaw()
    await until(lambda: "event=suspect_aside" in worker.log.read_text(), timeout=PATIENCE)
    return Stage(job, worker, rival=rival)


STAGES: dict[str, Reach] = {
    "waiting": waiting,
    "delayed": delayed,
    "running": running,
    "in prefill": in_prefill,
    "preempted": preempted,
    "swapped": swapped,
    "draining": draining,
    "aside": aside,
}
