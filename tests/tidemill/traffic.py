"""Somebody who submits and somebody who answers, each of whom goes on trying, across a failover."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

from tests.tidemill.echo_worker import finish, open_queue
from tests.tidemill.factories import make_job
from tests.tidemill.server_sets import await_that
from tests.tidemill.servers import Server
from tidemill.client import Client, ClientSettings
from tidemill.errors import JobUnknown, QueueUnavailable
from tidemill.jobs import JobId, Result
from tidemill.keys import QueueKeys
from tidemill.queue import Queue

T = TypeVar("T")

ANSWERS = "answers"
IDS = [JobId(f"job-{number}") for number in range(120)]
LATER = [JobId(f"afterwards-{number}") for number in range(20)]
"""Jobs while the primary changes, and once it has."""
PAUSE = 0.02
PATIENCE = 20.0
LIMIT = 60.0


class Traffic:
    """Asks, and answers what is asked, by way of one client and one worker."""

    def __init__(self, client: Client, queue: Queue) -> None:
        self._client = client
        self._queue = queue
        self.results: dict[JobId, Result] = {}

    async def answer(self) -> None:
        while True:
            for claimed in await self._patiently(lambda: self._queue.claim("echo", 100)):
                await self._patiently(partial(finish, self._queue, claimed))
            await self._patiently(lambda: self._queue.wait(PAUSE))

    async def ask(self, job_id: JobId) -> None:
        """Submit a job and wait for its answer; a job that the failover lost is submitted again."""
        while job_id not in self.results:
            await self._patiently(lambda: self._client.submit(make_job(job_id, prompt=job_id)))
            with suppress(JobUnknown):
                self.results[job_id] = await self._client.result(job_id, timeout=PATIENCE)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except QueueUnavailable:
                await asyncio.sleep(PAUSE)


@asynccontextmanager
async def traffic_on(url: str, name: str) -> AsyncIterator[Traffic]:
    settings = ClientSettings(patience=PATIENCE)
    async with (
        Client(url, queue=name, results=ANSWERS, settings=settings) as client,
        open_queue(url, name) as queue,
        asyncio.TaskGroup() as group,
    ):
        traffic = Traffic(client, queue)
        worker = group.create_task(traffic.answer())
        yield traffic
        worker.cancel()


async def assert_outlives(
    url: str, accident: Callable[[], None], is_over: Callable[[], bool], *, queue: str
) -> None:
    """Jobs are asked before, during and after the accident: all are answered."""
    async with traffic_on(url, queue) as traffic, asyncio.timeout(LIMIT):
        async with asyncio.TaskGroup() as group:
            for number, job_id in enumerate(IDS):
                if number == len(IDS) // 2:
                    await asyncio.to_thread(accident)
                group.create_task(traffic.ask(job_id))
                await asyncio.sleep(PAUSE)
        await asyncio.to_thread(await_that, is_over)
        async with asyncio.TaskGroup() as group:
            for job_id in LATER:
                group.create_task(traffic.ask(job_id))

    assert {job_id: result.text for job_id, result in traffic.results.items()} == {
        job_id: job_id for job_id in IDS + LATER
    }


def assert_recorded_once(server: Server, queue: str) -> None:
    """Of all that the new primary knows, each job has one result: read as no client of ours would."""
    with server.client() as redis:
        entries = redis.xrange(QueueKeys(queue).results(ANSWERS))
    recorded = Counter(fields[b"id"].decode() for _, fields in entries)
    assert set(recorded.values()) == {1}
    assert set(LATER) <= set(recorded)
