"""Jobs, results and queues for tests, every knob defaulted; and ways to make time pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from tidemill.jobs import Delta, Job, JobId, Priority, Result, Status
from tidemill.moves import Claimed, QueueSettings, Renewal, Submitted
from tidemill.params import SamplingParams
from tidemill.queue import Queue
from tidemill.registry import WorkerReport, WorkerState

LEASE = 2.0
"""Seconds. The servers of the session are older than this when the first test begins."""

REPLY = "reply"
WORKER = "worker-1"
OTHER = "worker-2"


def make_settings(**changes: Any) -> QueueSettings:
    return replace(QueueSettings(lease=LEASE), **changes)


def sibling(queue: Queue, redis: Redis, *, wire_version: int = 1, **changes: Any) -> Queue:
    """The same queue as another process sees it. Needs no closing unless it reads with `block`."""
    return Queue(redis, queue.name, replace(queue.settings, **changes), wire_version=wire_version)


def make_job(job_id: str | None = None, *, seed: int | None = None, **fields: Any) -> Job:
    fields.setdefault("prompt", "Once upon a time")
    if seed is not None:
        fields["params"] = SamplingParams(seed=seed)
    if job_id is not None:
        fields["id"] = job_id
    return Job.parse(fields)


def make_result(job_id: str, text: str = "the end", **fields: Any) -> Result:
    fields.setdefault("status", Status.SUCCEEDED)
    return Result(id=JobId(job_id), text=text, **fields)


def make_report(name: str = WORKER, **changes: object) -> WorkerReport:
    values = {
        "name": name, "queue": "q", "model": "m", "host": "node-1", "pid": 7, "version": "1.0",
        "fingerprint": "f", "device": "cpu", "state": WorkerState.SERVING, "capacity": 8, "running": 3,
        "waiting": 1, "held": 5, "unrecorded": 0, "kv_usage": 0.5, "uptime": 12.5, "heartbeat": 5.0,
    }  # fmt: skip
    return WorkerReport.model_validate({**values, **changes})


def make_deltas(*sizes: int, start: int = 0) -> tuple[Delta, ...]:
    """Deltas of so many tokens each; token 7 is token number 7, its text is `7 `."""
    ends = itertools.accumulate(sizes, initial=start)
    return tuple(
        Delta(index=first, token_ids=tuple(range(first, end)), text=text_of(first, end))
        for first, end in itertools.pairwise(ends)
    )


def text_of(first: int, end: int) -> str:
    return "".join(f"{token} " for token in range(first, end))


def renewal(claimed: Claimed, *sizes: int, start: int = 0) -> Renewal:
    return Renewal(claimed.job_id, claimed.attempt, make_deltas(*sizes, start=start))


async def submit(queue: Queue, *jobs: Job, reply_to: str = REPLY) -> None:
    """Submit jobs that must be new."""
    outcomes = await queue.submit(jobs, reply_to=reply_to)
    assert outcomes == [Submitted.CREATED] * len(jobs)


async def submit_and_claim(queue: Queue, job_id: str = "a", worker: str = WORKER, **fields: Any) -> Claimed:
    """Put one job into the queue and into the hands of a worker."""
    await submit(queue, make_job(job_id, **fields))
    (claimed,) = await queue.claim(worker, 1)
    assert claimed.job_id == job_id
    return claimed


def ids(claimed: Sequence[Claimed]) -> list[str]:
    return [job.job_id for job in claimed]


def timeless(claimed: Sequence[Claimed]) -> list[Claimed]:
    """What was claimed, whenever the reply was made."""
    return [replace(job, claimed_ms=0) for job in claimed]


async def lapse(redis: Redis, queue: Queue, *job_ids: str) -> None:
    """Let the leases of these jobs have run out."""
    for job_id in job_ids:
        assert await redis.zadd(queue.keys.leases, {job_id: 1}, xx=True, ch=True) == 1


async def reclaim_after_lapse(redis: Redis, queue: Queue, job_id: str, worker: str = OTHER) -> list[Claimed]:
    await lapse(redis, queue, job_id)
    return await queue.reclaim(worker, 10)


async def make_suspect(redis: Redis, queue: Queue, *job_ids: str) -> None:
    """Let waiting jobs have failed so often that one more time would bury them."""
    for job_id in job_ids:
        failures = queue.settings.max_attempts - 1
        assert await redis.hset(queue.keys.job(JobId(job_id)), "failures", str(failures)) == 1


async def make_due(redis: Redis, queue: Queue, job_id: str) -> None:
    """Let the backoff of a delayed job be over."""
    assert await redis.zadd(queue.keys.delayed, {job_id: 1}, xx=True, ch=True) == 1


async def make_late(redis: Redis, queue: Queue, job_id: str) -> None:
    """Let the deadline of a job have passed."""
    await redis.hset(queue.keys.job(JobId(job_id)), "deadline", "1")
    await redis.zadd(queue.keys.deadlines, {job_id: 1}, xx=True)


async def results_of(queue: Queue, job_id: str, name: str = REPLY) -> list[Result]:
    """All results that a reply stream has for a job."""
    return [result for _, result in await queue.results(name, count=10_000) if result.id == job_id]


async def only_result(queue: Queue, job_id: str, name: str = REPLY) -> Result:
    (result,) = await results_of(queue, job_id, name)
    return result


def waiting(depth_by_tenant: Any, priority: Priority = Priority.NORMAL, tenant: str = "default") -> int:
    count: int = depth_by_tenant.get((priority, tenant), 0)
    return count
