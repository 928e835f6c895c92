"""What the commands for operators show: workers that report, and jobs that were given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from tests.tidemill.factories import make_settings, reclaim_after_lapse
from tests.tidemill.servers import Server
from tidemill.connection import connect
from tidemill.jobs import Job
from tidemill.queue import Queue
from tidemill.registry import WorkerReport, WorkerState

LEASE = 1.0
"""Seconds; no lease is given up within as much of the server's start."""


def make_report(name: str, queue: str, **changes: object) -> WorkerReport:
    who = {"name": name, "queue": queue, "model": "m", "host": "mill", "pid": 7, "version": "1"}
    what = {"fingerprint": "f", "device": "cpu", "state": WorkerState.SERVING, "capacity": 8, "kv_usage": 0.5}
    how_much = {"running": 3, "waiting": 1, "held": 4, "unrecorded": 0, "uptime": 60.0, "heartbeat": 5.0}
    return WorkerReport.model_validate(who | what | how_much | changes)


def report(server: Server, *reports: WorkerReport) -> None:
    """Let workers be listed."""

    async def send() -> None:
        for made in reports:
            async with _opened(server, made.queue) as (queue, _):
                await queue.report(made)

    asyncio.run(send())


def bury(server: Server, queue_name: str, *jobs: Job) -> None:
    """Submit jobs and let their only attempt end with its worker lost."""

    async def give_up() -> None:
        async with _opened(server, queue_name) as (queue, redis):
            for job in jobs:
                await queue.submit([job], reply_to="submitter")
                (claimed,) = await queue.claim("lost-worker", 1)
                assert await reclaim_after_lapse(redis, queue, claimed.job_id) == []

    server.await_uptime(LEASE)
    asyncio.run(give_up())


@asynccontextmanager
async def _opened(server: Server, name: str) -> AsyncIterator[tuple[Queue, Redis]]:
    redis = connect(server.url)
    queue = Queue(redis, name, make_settings(lease=LEASE, max_attempts=1))
    try:
        yield queue, redis
    finally:
        await queue.aclose()
        await redis.aclose()
