"""Workers that take no time: jobs end in the order of their size, by a clock that only they move."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.tidemill.factories import REPLY, make_job, make_result
from tidemill.jobs import Job, JobId, Usage
from tidemill.moves import Claimed, FinishOutcome
from tidemill.queue import Queue

BATCH = 5000
"""Jobs submitted in one round trip."""


def tenant_of(job_id: str) -> str:
    """Jobs of a crowd are named after their tenant."""
    return job_id.split("-", maxsplit=1)[0]


def make_jobs(tenant: str, count: int, start: int = 0) -> list[Job]:
    """Alike but for their ids, and made some five times as fast as by validating each."""
    pattern = make_job(tenant=tenant)
    names = (JobId(f"{tenant}-{number}") for number in range(start, start + count))
    return [pattern.model_copy(update={"id": name}) for name in names]


async def submit_backlog(queue: Queue, tenant: str, count: int, start: int = 0) -> None:
    for first in range(start, start + count, BATCH):
        jobs = make_jobs(tenant, min(BATCH, start + count - first), first)
        await queue.submit(jobs, reply_to=REPLY)


def units(usage: Usage) -> int:
    """Service as the paper counts it."""
    return usage.prompt_tokens + 2 * usage.completion_tokens


@dataclass
class SimulatedWorkers:
    """Workers whose places are always filled, as far as there are jobs.

    Args:
        usage_of: what the next job of a tenant will turn out to need; nobody knows before it ends.
        room: places of each worker.
    """

    queue: Queue
    usage_of: Callable[[str], Usage]
    workers: int = 2
    room: int = 2
    claims: list[str] = field(default_factory=list)
    """Tenants, in the order in which their jobs were claimed."""
    served: Counter[str] = field(default_factory=Counter)
    """Units of the jobs that have ended, by tenant."""
    history: list[Counter[str]] = field(default_factory=list)
    """The same after each job."""
    largest: int = 0
    """Units of the largest job claimed."""
    _clock: int = 0
    _running: list[tuple[int, int, str, Claimed, Usage]] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        """The most units of claimed jobs at once, U in the paper."""
        return self.workers * self.room * self.largest

    async def run(self, num_jobs: int) -> None:
        """Let so many jobs end; fewer if there are no more."""
        for _ in range(num_jobs):
            await self.fill()
            if not self._running:
                return
            await self.end_one()

    async def fill(self) -> None:
        for number in range(self.workers):
            worker = f"simulated-{number}"
            held = sum(holder == worker for _, _, holder, _, _ in self._running)
            for claimed in await self.queue.claim(worker, self.room - held):
                self._begin(worker, claimed)

    def _begin(self, worker: str, claimed: Claimed) -> None:
        tenant = tenant_of(claimed.job_id)
        usage = self.usage_of(tenant)
        self.claims.append(tenant)
        self.largest = max(self.largest, units(usage))
        end = self._clock + units(usage)
        heapq.heappush(self._running, (end, len(self.claims), worker, claimed, usage))

    async def end_one(self) -> None:
        self._clock, _, worker, claimed, usage = heapq.heappop(self._running)
        result = make_result(claimed.job_id, usage=usage)
        assert await self.queue.finish(worker, claimed.attempt, result) is FinishOutcome.OK
        self.served[tenant_of(claimed.job_id)] += units(usage)
        self.history.append(self.served.copy())

    def greatest_gap(self, one: str, other: str, weights: tuple[float, float] = (1, 1)) -> float:
        """Most that one of two tenants was served beyond the other in any span of time, by weight."""
        ahead = [0.0] + [seen[one] / weights[0] - seen[other] / weights[1] for seen in self.history]
        return max(ahead) - min(ahead)
