"""Waiting for room, against a queue whose limits the test controls."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from redis.exceptions import OutOfMemoryError

from tests.tidemill.factories import make_job
from tidemill.errors import InvalidJob, QueueFull, QueueUnavailable
from tidemill.jobs import Job
from tidemill.patience import Patience
from tidemill.submission import Outcome, Submission


class LimitedQueue:
    """Takes so many jobs, of each tenant and in all; refuses those whose prompt is `bad`."""

    def __init__(self, room: float = math.inf, **of_tenants: int) -> None:
        self.room = room
        self.of_tenants = Counter(of_tenants)
        self.tries: list[list[str]] = []
        self.taken: list[str] = []

    async def submit(self, jobs: Sequence[Job]) -> list[Outcome]:
        self.tries.append([job.id for job in jobs])
        outcomes = [self._outcome(job) for job in jobs]
        await asyncio.sleep(0)
        return outcomes

    def _outcome(self, job: Job) -> Outcome:
        if job.prompt == "bad":
            return InvalidJob("bad")
        if self.room <= 0:
            return QueueFull("queue is full", limit=1)
        if job.tenant in self.of_tenants and self.of_tenants[job.tenant] <= 0:
            return QueueFull(f"tenant {job.tenant} is full", limit=1)
        self.room -= 1
        self.of_tenants.subtract([job.tenant] if job.tenant in self.of_tenants else [])
        self.taken.append(job.id)
        return job.id


def make_submission(queue: LimitedQueue, wait: float, *, patience: float = 60.0) -> Submission:
    return Submission(queue.submit, patience=Patience(patience), wait_for_room=wait)


async def settle(
    queue: LimitedQueue, jobs: Sequence[Job], wait: float, *, patience: float = 60.0
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    async for settled in make_submission(queue, wait, patience=patience).settle(jobs):
        outcomes.update(settled)
    return [outcomes[place] for place in range(len(jobs))]


def make_jobs(count: int, **fields: object) -> list[Job]:
    return [make_job(f"{fields.get('tenant', 'job')}-{number}", **fields) for number in range(count)]


def ids(jobs: Sequence[Job]) -> list[str]:
    return [job.id for job in jobs]


async def test_without_waiting_there_is_one_try() -> None:
    queue, jobs = LimitedQueue(room=2), make_jobs(4)
    outcomes = await settle(queue, jobs, 0.0)
    assert outcomes[:2] == ids(jobs[:2])
    assert all(isinstance(outcome, QueueFull) for outcome in outcomes[2:])
    assert queue.tries == [ids(jobs)]


async def test_jobs_are_accepted_in_their_order_as_room_comes() -> None:
    queue, jobs = LimitedQueue(room=3), make_jobs(40)
    waiting = asyncio.create_task(settle(queue, jobs, 60.0))
    while len(queue.taken) < len(jobs):
        await asyncio.sleep(0.001)
        queue.room = 1
    assert await waiting == queue.taken == ids(jobs)


async def test_a_full_queue_is_asked_for_one_job_at_a_time_and_room_is_filled_quickly() -> None:
    """Given 200 refused jobs, the queue is not sent all of them again and again."""
    queue, jobs = LimitedQueue(room=0), make_jobs(200)
    waiting = asyncio.create_task(settle(queue, jobs, 60.0))
    while len(queue.tries) < 4:
        await asyncio.sleep(0.001)
    assert [len(tried) for tried in queue.tries] == [200, 1, 1, 1]
    queue.room = math.inf
    await waiting
    assert [len(tried) for tried in queue.tries[4:]] == [1, 2, 4, 8, 16, 32, 64, 73]


async def test_only_refused_jobs_are_tried_again() -> None:
    queue, jobs = LimitedQueue(room=2), [*make_jobs(3), make_job("bad", prompt="bad")]
    waiting = asyncio.create_task(settle(queue, jobs, 60.0))
    while len(queue.tries) < 2:
        await asyncio.sleep(0.001)
    queue.room = 10
    outcomes = await waiting
    assert {tuple(tried) for tried in queue.tries[1:]} == {("job-2",)}
    assert isinstance(outcomes[3], InvalidJob)
    assert outcomes[:3] == ids(jobs[:3])


async def test_other_refusals_and_accepted_ids_are_told_before_room_is_waited_for() -> None:
    queue, jobs = LimitedQueue(room=1), [*make_jobs(2), make_job("bad", prompt="bad")]
    parts = make_submission(queue, 60.0).settle(jobs)
    told = dict(await anext(parts))
    assert set(told) == {0, 2}
    assert isinstance(told[2], InvalidJob)
    await parts.aclose()


async def test_a_full_tenant_does_not_hold_up_the_others() -> None:
    queue = LimitedQueue(acme=0)
    jobs = [*make_jobs(3, tenant="acme"), *make_jobs(3, tenant="other")]
    waiting = asyncio.create_task(settle(queue, jobs, 60.0))
    while len(queue.taken) < 3:
        await asyncio.sleep(0.001)
    assert queue.taken == ids(jobs[3:])
    queue.of_tenants["acme"] = 5
    assert await waiting == ids(jobs)
    assert queue.taken == [*ids(jobs[3:]), *ids(jobs[:3])]


async def test_tenants_that_were_refused_for_the_queue_are_all_tried() -> None:
    queue = LimitedQueue(room=0, acme=0)
    jobs = [*make_jobs(50, tenant="acme"), *make_jobs(50, tenant="other")]
    waiting = asyncio.create_task(settle(queue, jobs, 60.0))
    while len(queue.tries) < 2:
        await asyncio.sleep(0.001)
    queue.room = math.inf
    while len(queue.taken) < 50:
        await asyncio.sleep(0.001)
    assert queue.taken == ids(jobs[50:])
    queue.of_tenants["acme"] = 50
    await waiting


async def test_the_time_limit_is_exact_and_ends_with_a_try_of_all() -> None:
    queue, jobs = LimitedQueue(room=0), make_jobs(3)
    clock = asyncio.get_running_loop().time
    began = clock()
    outcomes = await settle(queue, jobs, 0.3)
    assert clock() - began >= 0.3
    assert all(isinstance(outcome, QueueFull) for outcome in outcomes)
    assert queue.tries[0] == queue.tries[-1] == ids(jobs)
    assert len(queue.tries) <= 8  # no pause is shorter than 25 ms, and they grow


async def test_the_next_batch_begins_with_what_the_last_one_learned() -> None:
    queue = LimitedQueue(room=0)
    submission = make_submission(queue, 0.05)
    async for _ in submission.settle(make_jobs(10)):
        pass
    queue.tries.clear()
    queue.room = math.inf
    async for _ in submission.settle(make_jobs(7)):
        pass
    assert [len(tried) for tried in queue.tries] == [1, 2, 4]


class RestartingQueue(LimitedQueue):
    """Away for so many tries after the first one."""

    def __init__(self, away: int) -> None:
        super().__init__(room=0)
        self.away = away

    async def submit(self, jobs: Sequence[Job]) -> list[Outcome]:
        if self.tries and self.away > 0:
            self.away -= 1
            self.room = math.inf
            raise QueueUnavailable("away")
        return await super().submit(jobs)


async def test_an_outage_while_waiting_is_ridden_out() -> None:
    queue, jobs = RestartingQueue(away=2), make_jobs(3)
    assert await settle(queue, jobs, 60.0) == ids(jobs) == queue.taken


@pytest.mark.parametrize(("patience", "wait"), [(0.0, math.inf), (math.inf, 0.2)])
async def test_an_outage_is_told_when_patience_or_the_time_for_room_is_over(
    patience: float, wait: float
) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    with pytest.raises(QueueUnavailable, match="away"):
        async with asyncio.timeout(60):
            await settle(RestartingQueue(away=10**6), make_jobs(2), wait, patience=patience)
    assert clock() - began >= min(patience, wait)


async def test_without_waiting_an_outage_is_told_at_once() -> None:
    queue = RestartingQueue(away=1)
    await settle(queue, make_jobs(1), 0.0)
    with pytest.raises(QueueUnavailable, match="away"):
        await settle(queue, make_jobs(1), 0.0)


@pytest.mark.parametrize("wait", [-1.0, math.nan])
def test_a_time_limit_that_is_none_is_refused(wait: float) -> None:
    with pytest.raises(ValueError, match="wait_for_room must be at least 0 s"):
        make_submission(LimitedQueue(), wait)


class FullServer(LimitedQueue):
    """Out of memory for the first tries."""

    def __init__(self, num_refusals: float) -> None:
        super().__init__()
        self._num_refusals = num_refusals

    async def submit(self, jobs: Sequence[Job]) -> list[Outcome]:
        if len(self.tries) < self._num_refusals:
            self.tries.append(ids(jobs))
            raise QueueUnavailable("out of memory") from OutOfMemoryError("OOM")
        return await super().submit(jobs)


async def test_a_server_without_memory_is_waited_for_as_for_room() -> None:
    """Workers make room there too; only who is away is given up when patience is over."""
    queue, jobs = FullServer(3), make_jobs(4)
    assert await settle(queue, jobs, 60.0, patience=0.0) == ids(jobs)
    assert len(queue.tries) == 4


async def test_nor_is_that_waited_for_beyond_the_time() -> None:
    with pytest.raises(QueueUnavailable, match="out of memory"):
        await settle(FullServer(math.inf), make_jobs(4), 0.2, patience=0.0)
    once = FullServer(math.inf)
    with pytest.raises(QueueUnavailable, match="out of memory"):
        await settle(once, make_jobs(4), 0.0)
    assert len(once.tries) == 1
