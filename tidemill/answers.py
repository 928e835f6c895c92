"""Where a client finds the answers to jobs: its result stream, and the hashes of the jobs."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from tidemill import wire
from tidemill.errors import JobUnknown
from tidemill.jobs import JobId, Result
from tidemill.moves import JobState, JobView
from tidemill.queue import Queue
from tidemill.refusals import refusals_explained


class RecordedAnswers:
    """The inbox's source: the client's result stream by cursor, and any jobs' hashes in two round trips."""

    def __init__(self, redis: Redis, queue: Queue, name: str) -> None:
        self._redis = redis
        self._queue = queue
        self._name = name

    async def tail(self) -> str:
        with refusals_explained(self._redis):
            seconds, microseconds = await self._redis.time()
        # Entries are numbered by the server's milliseconds; one of this very millisecond is included.
        return f"{seconds * 1000 + microseconds // 1000 - 1}-0"

    async def read(self, cursor: str, *, count: int, block: float) -> Sequence[tuple[str, Result]]:
        return await self._queue.results(self._name, cursor, count=count, block=block)

    async def look(self, job_ids: Sequence[JobId]) -> Sequence[Result | JobUnknown | None]:
        views = await self._views(job_ids)
        if any(view and view.may_expire for view in views):
            await self._queue.expire()  # claims do it too, but perhaps nobody claims
        results = await self._results([view for view in views if view and view.state is JobState.DONE])
        return [
            self._unknown(job_id) if view is None
            else None if view.state is not JobState.DONE
            else results.get(job_id) or self._unknown(job_id)
            for job_id, view in zip(job_ids, views, strict=True)
        ]  # fmt: skip

    async def _views(self, job_ids: Sequence[JobId]) -> list[JobView | None]:
        with refusals_explained(self._redis):
            pipeline = self._redis.pipeline(transaction=False)
            for job_id in job_ids:
                pipeline.hmget(self._queue.keys.job(job_id), list(wire.VIEW_FIELDS))
            replies = await pipeline.execute()
        return [wire.job_view(*pair) for pair in zip(job_ids, replies, strict=True)]

    async def _results(self, done: Sequence[JobView]) -> dict[JobId, Result]:
        """The results that are still there; one may have several copies."""
        copies = [(name, entry) for view in done for name, entry in view.replies.items() if entry]
        with refusals_explained(self._redis):
            pipeline = self._redis.pipeline(transaction=False)
            for name, entry in copies:
                pipeline.xrange(self._queue.keys.results(name), entry, entry)
            replies = await pipeline.execute() if copies else []
        results = (wire.result(*entries[0])[1] for entries in replies if entries)
        return {result.id: result for result in results}

    def _unknown(self, job_id: JobId) -> JobUnknown:
        return unknown(self._queue.name, job_id)


def unknown(queue: str, job_id: JobId) -> JobUnknown:
    """The error of those who ask for a job that is not there."""
    return JobUnknown(f"job {job_id} is unknown in queue {queue}, or its result has expired")
