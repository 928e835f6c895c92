"""Jobs, workers and the test's end of a queue, every knob defaulted."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis.asyncio import Redis
from worker_processes import WorkerProcess, WorkerProcesses

from tests.e2e.polling import until
from tests.faults.kinds_of_server import server_of
from tests.faults.sabotage import Sabotaged
from tests.tidemill.servers import Server
from tidemill.client import Client, ClientSettings
from tidemill.connection import connect
from tidemill.errors import QueueUnavailable
from tidemill.jobs import Delta, Job, JobId, Result
from tidemill.keys import QueueKeys
from tidemill.moves import JobState, QueueSettings
from tidemill.params import SamplingParams
from tidemill.queue import Queue

T = TypeVar("T")

LEASE = 2.0
"""Seconds: a worker that is starved for most of that keeps its jobs all the same."""
PATIENCE = 60.0
"""Seconds that a test waits for what must come, before it takes the product to hang."""
MODEL = "tiny"
PROMPTS = ("The tide turns", "Once a miller", "By the sea", "水車は潮で")
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 0.8, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.8, "n": 2},
)
WORKER_FLAGS: dict[str, object] = {
    "served_model_name": MODEL,
    "lease": LEASE,
    "renewal": 0.2,
    "stream_interval": 0.05,
    "max_num_seqs": 8,
    "claim_ahead": 2,
    "kv_cache_memory": 0.01,
}


def make_job(label: str = "job", *, number: int = 0, **fields: Any) -> Job:
    """One that generates to its end whatever the model says, in one of several ways.

    Every second one of these is streamed. `label` begins its id.
    """
    kind, prompt = KINDS[number % len(KINDS)], PROMPTS[number // 2 % len(PROMPTS)]
    params = {"max_tokens": 60, "seed": number, "ignore_eos": True, **kind, **fields.pop("params", {})}
    given: dict[str, Any] = {"stream": number % 2 == 0, **fields}
    if not {"prompt_token_ids", "messages"} & given.keys():
        given.setdefault("prompt", prompt)
    return Job(id=JobId(f"{label}-{number}-{uuid.uuid4().hex[:8]}"), params=SamplingParams(**params), **given)


def make_jobs(count: int, label: str = "job", **fields: Any) -> list[Job]:
    return [make_job(label, number=number, **fields) for number in range(count)]


@dataclass
class Place:
    """The test's end of one queue: what it has submitted, who serves, and what the server says."""

    server: Server
    connection: Redis
    queue: Queue
    client: Client
    workers: WorkerProcesses
    submitted: dict[JobId, Job] = field(default_factory=dict)
    told: dict[JobId, list[Delta]] = field(default_factory=dict)
    """What the readers of streamed jobs have been told so far."""
    streams: dict[JobId, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def keys(self) -> QueueKeys:
        return self.queue.keys

    def redis(self) -> redis.Redis:
        """The server itself, past everything of ours."""
        return self.server.client()

    def answered_ids(self) -> set[JobId]:
        """Jobs whose result is in the client's stream, by a look that waits for nobody."""
        return set(self.result_ids())

    def result_ids(self) -> list[JobId]:
        """Whose results the client's stream has, duplicates included: read as no client of ours would."""
        with self.redis() as server:
            entries = server.xrange(self.keys.results(self.client.results))
        return [JobId(fields[b"id"].decode()) for _, fields in entries]

    def start(self, command: Sabotaged | None = None, **flags: object) -> WorkerProcess:
        return self.workers.start(command, **flags)

    async def start_ready(self, command: Sabotaged | None = None, **flags: object) -> WorkerProcess:
        worker = self.start(command, **flags)
        await worker.ready()
        return worker

    async def submit(self, *jobs: Job) -> None:
        """Put new jobs in, however often that takes, and read along where they are streamed."""
        assert await persist(lambda: self.client.submit_batch(jobs)) == [job.id for job in jobs]
        for job in jobs:
            self.submitted[job.id] = job
            if job.stream:
                told = self.told[job.id] = []
                self.streams[job.id] = asyncio.create_task(self._read_along(job.id, told))

    def forget(self) -> None:
        """Expect no answer to what was submitted so far."""
        self.submitted.clear()
        self.told.clear()
        self.streams.clear()

    async def _read_along(self, job_id: JobId, told: list[Delta]) -> None:
        async for delta in self.client.stream(job_id):
            told.append(delta)

    async def under_way(
        self, jobs: Sequence[Job], worker: WorkerProcess | None = None, *, tokens: int = 5
    ) -> None:
        """Return once so many tokens of each are checkpointed, by `worker` if it matters by whom."""

        async def all_are() -> bool:
            views = [await self.client.status(job.id) for job in jobs]
            assert all(view.state is not JobState.DONE for view in views), "the jobs are too short"
            return all(
                view.checkpointed_tokens >= tokens and (worker is None or worker.holds(view.worker))
                for view in views
            )

        await until(all_are, timeout=PATIENCE)

    async def results(self, jobs: Sequence[Job]) -> list[Result]:
        """The answer to each, as a client gets it."""
        ids = [job.id for job in jobs]
        found = {result.id: result async for result in self.client.as_completed(ids, timeout=PATIENCE)}
        return [found[job_id] for job_id in ids]

    async def deltas(self, job: Job) -> list[Delta]:
        """What the reader of its stream was told, from its beginning to its end."""
        async with asyncio.timeout(PATIENCE):
            await self.streams[job.id]
        return self.told[job.id]


async def persist(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer to what is asked again and again until the server can be used."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await ask()
            except QueueUnavailable:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def open_place(
    server: Server,
    model: Path,
    folder: Path,
    *,
    url: str | None = None,
    worker_url: str | None = None,
    settings: QueueSettings | None = None,
    **flags: object,
) -> AsyncIterator[Place]:
    """A queue of its own on `server`; `url` and `worker_url` lead there by other ways."""
    name = f"faults-{uuid.uuid4().hex[:8]}"
    settings = settings or QueueSettings(lease=LEASE)
    connection = connect(server.url)
    queue = Queue(connection, name, settings)
    client = Client(url or server.url, queue=name, settings=ClientSettings(queue=settings))
    workers = WorkerProcesses(
        folder,
        command=Sabotaged(),
        model=model,
        queue=name,
        redis_url=worker_url or server.url,
        **{**WORKER_FLAGS, **flags},
    )
    place = Place(server, connection, queue, client, workers)
    try:
        with workers:
            yield place
    finally:
        for stream in place.streams.values():
            stream.cancel()
        await asyncio.gather(*place.streams.values(), return_exceptions=True)
        await client.close()
        await queue.aclose()
        await connection.aclose()


@asynccontextmanager
async def open_own_place(
    kind: str, model: Path, folder: Path, *options: str, **flags: Any
) -> AsyncIterator[Place]:
    """A queue on a server that nothing else is on, for what is done to the server.

    Args:
        kind: of server.
        options: of the server.
        flags: as for `open_place`.
    """
    with server_of(kind, *options) as server:
        async with open_place(server, model, folder, **flags) as place:
            yield place
