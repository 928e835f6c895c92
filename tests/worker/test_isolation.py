"""A job that may bring the worker down: alone in it, at its own risk only, and holding up nobody for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.tidemill.servers import running, valkey_binary
from tests.worker.factories import (
    FakeEngine,
    Place,
    RunningWorker,
    eventually,
    expected_tokens,
    make_held,
    make_job,
    opener,
    running_worker,
)
from tests.worker.hanging import HangingEngine
from tidemill.client import Client
from tidemill.jobs import Job, JobId, Status
from tidemill.keys import JobField, QueueKeys
from tidemill.moves import CancelOutcome, JobState, Renewal
from tidemill_worker.held import HeldJob, HeldJobs
from tidemill_worker.isolation import Isolation


async def submit(client: Client, *jobs: Job, suspect: Job) -> None:
    """The last of them one more failure would bury, of workers that give it two attempts.

    Before there is a worker, which might take it before it has had its first.
    """
    for job in (*jobs, suspect):
        await client.submit(job)
    await client._redis.hset(QueueKeys(client.queue).job(suspect.id), JobField.FAILURES, 1)


async def risk(client: Client, job: Job) -> bytes | None:
    """Whether a failure would count now."""
    value: bytes | None = await client._redis.hget(QueueKeys(client.queue).job(job.id), JobField.ALONE)
    return value


def is_aside(worker: RunningWorker) -> bool:
    return worker.service.held.num_aside == 1


async def assert_answered(client: Client, *jobs: Job) -> None:
    for job in jobs:
        result = await client.result(job.id, timeout=15)
        assert result.token_ids == expected_tokens(job, job.params.max_tokens)


async def test_a_suspect_runs_with_nothing_beside_it(place: Place, client: Client) -> None:
    """Given a worker with work, when it claims a suspect, then that waits until all else has ended, and all
    that comes later waits for it."""
    first, suspect, later = make_job("Mill"), make_job("Tide"), [make_job(f"Corn {n}") for n in range(3)]
    await submit(client, first, suspect=suspect)
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, max_attempts=2) as worker:
        await eventually(lambda: is_aside(worker))
        for job in later:
            await client.submit(job)
        assert await risk(client, suspect) == b"held"
        assert worker.service.stats().intake_is_paused

        engine.allow(first.params.max_tokens)
        await assert_answered(client, first)
        await eventually(lambda: engine.seen == [f"{first.id}/1", f"{suspect.id}/1"])
        assert await risk(client, suspect) == b"begun"
        assert (await client.depth()).waiting == len(later)

        engine.allow(suspect.params.max_tokens - 1)
        await eventually(lambda: engine._generated == 2 * suspect.params.max_tokens - 1)
        assert (worker.service.held.num_live, len(engine.seen)) == (1, 2)
        assert worker.service.stats().intake_is_paused
        engine.free()
        await assert_answered(client, suspect, *later)
        assert not worker.service.stats().intake_is_paused


async def test_suspects_take_turns(place: Place, client: Client) -> None:
    suspects = [make_job(f"Tide {n}") for n in range(4)]
    for job in suspects:
        await submit(client, suspect=job)
    engine = FakeEngine()
    async with running_worker(place, engine=engine, max_attempts=2):
        await assert_answered(client, *suspects)
    assert engine.most_at_once == 1


async def test_a_suspect_is_not_even_decoded_beside_others(place: Place, client: Client) -> None:
    """What is wrong with it might be its payload."""
    first, suspect = make_job("Mill"), make_job("Tide")
    await submit(client, first, suspect=suspect)
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, max_attempts=2) as worker:
        await eventually(lambda: is_aside(worker))
        [held] = [job for job in worker.service.held._jobs.values() if job.id == suspect.id]
        await asyncio.sleep(0.2)
        assert held.job is None
        engine.free()
        await assert_answered(client, first, suspect)
        assert held.job == suspect


async def test_a_suspect_can_be_cancelled_aside(place: Place, client: Client) -> None:
    """It is answered as if it had waited in the queue, with what belongs to it."""
    first, suspect = make_job("Mill"), make_job("Tide", metadata={"row": "7"})
    await submit(client, first, suspect=suspect)
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, max_attempts=2, renewal=10.0) as worker:
        await eventually(lambda: is_aside(worker))
        assert await client.cancel(suspect.id) is CancelOutcome.REQUESTED
        result = await client.result(suspect.id, timeout=10)
        assert (result.status, result.metadata) == (Status.CANCELLED, {"row": "7"})
        other = make_job("Corn")
        await client.submit(other)
        await eventually(lambda: len(engine.seen) == 2)
        engine.free()
        await assert_answered(client, first, other)
    assert f"{suspect.id}/1" not in engine.seen


async def test_a_suspect_expires_aside(place: Place, client: Client) -> None:
    first, suspect = make_job("Mill"), make_job("Tide", deadline=0.6)
    await submit(client, first, suspect=suspect)
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, max_attempts=2):
        result = await client.result(suspect.id, timeout=10)
        assert result.status is Status.EXPIRED
        engine.free()
        await assert_answered(client, first)
    assert engine.seen == [f"{first.id}/1"]


async def test_a_worker_that_drains_gives_its_suspect_back_at_once(place: Place, client: Client) -> None:
    """Not counted, and not after the grace period either."""
    first, suspect = make_job("Mill"), make_job("Tide")
    await submit(client, first, suspect=suspect)
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, max_attempts=2, grace_period=60.0) as worker:
        await eventually(lambda: is_aside(worker))
        worker.service.request_stop()
        await eventually(lambda: not is_aside(worker))
        view = await client.status(suspect.id)
        assert (view.state, view.failures, view.attempt) == (JobState.WAITING, 1, 1)
        engine.free()
        assert await asyncio.wait_for(worker.task, 20) is True
    await assert_answered(client, first)


async def test_a_suspect_that_runs_when_its_worker_drains_is_no_failure(place: Place, client: Client) -> None:
    suspect = make_job("Tide", params={"max_tokens": 20})
    await submit(client, suspect=suspect)
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, max_attempts=2, grace_period=0.1) as worker:
        engine.allow(3)
        await eventually(lambda: engine._generated == 3)
        assert await worker.stop() is True
    view = await client.status(suspect.id)
    assert (view.state, view.failures, view.checkpointed_tokens) == (JobState.WAITING, 1, 3)


async def test_a_suspect_whose_step_hangs_when_its_worker_drains_is_left_to_count(
    place: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease lapses: no worker will be hung by it again because this one was told to stop in time."""
    monkeypatch.setattr("tidemill_worker.engine_thread.JOIN_TIMEOUT", 0.05)
    suspect = make_job("Tide")
    await submit(client, suspect=suspect)
    engine = HangingEngine()
    async with running_worker(place, engine=engine, max_attempts=2, grace_period=0.0) as worker:
        await eventually(engine.stepping.is_set)
        assert await worker.stop() is False
    assert (await client.status(suspect.id)).state is JobState.RUNNING
    assert await risk(client, suspect) == b"begun"


async def test_a_suspect_lost_aside_is_forgotten(place: Place, client: Client) -> None:
    first, suspect = make_job("Mill"), make_job("Tide")
    await submit(client, first, suspect=suspect)
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, max_attempts=2, renewal=0.05) as worker:
        await eventually(lambda: is_aside(worker))
        async with opener(place, max_attempts=2)() as queue:
            await queue.release("w1", [Renewal(suspect.id, 1)])
        await eventually(lambda: worker.service.held.live_attempt(suspect.id) != f"{suspect.id}/1")
        engine.free()
        await assert_answered(client, first, suspect)
    assert engine.seen == [f"{first.id}/1", f"{suspect.id}/2"]


async def test_a_suspect_cancelled_amid_its_run_lets_the_others_in(place: Place, client: Client) -> None:
    suspect, later = make_job("Tide", params={"max_tokens": 50}), make_job("Corn")
    await submit(client, suspect=suspect)
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, max_attempts=2) as worker:
        engine.allow(2)
        await eventually(lambda: engine._generated == 2)
        await client.submit(later)
        assert await client.cancel(suspect.id) is CancelOutcome.REQUESTED
        result = await client.result(suspect.id, timeout=10)
        assert (result.status, len(result.token_ids)) == (Status.CANCELLED, 2)
        engine.free()
        await assert_answered(client, later)
        assert worker.service.held.num_live == 0


async def test_an_absence_of_redis_at_the_beginning_is_waited_out() -> None:
    with running(valkey_binary(), "--appendonly", "yes", "--appendfsync", "always") as server:
        place = Place(server.url, "alone")
        first, suspect = make_job("Mill"), make_job("Tide")
        engine = FakeEngine(paced=True)
        async with place.client() as client:
            await submit(client, first, suspect=suspect)
            async with running_worker(place, engine=engine, max_attempts=2) as worker:
                await eventually(lambda: is_aside(worker))
                await asyncio.to_thread(server.kill)
                engine.free()
                await eventually(lambda: worker.service.held.num_unrecorded == 1)
                await asyncio.to_thread(server.start)
                await assert_answered(client, first, suspect)
                assert (await client.status(suspect.id)).attempt == 1


class Queue:
    """Knows of one job, which is what it was told to be."""

    def __init__(self, *, begins: bool = True) -> None:
        self.begins = begins
        self.calls: list[str] = []

    async def begin(self, worker: str, job_id: JobId, attempt: int) -> bool:
        self.calls.append("begin")
        return self.begins

    async def release(self, worker: str, renewals: list[Renewal]) -> frozenset[JobId]:
        self.calls.append("release")
        return frozenset()


def make_isolation(
    queue: Queue, *jobs: HeldJob, noise: list[str] | None = None
) -> tuple[Isolation, HeldJobs]:
    held = HeldJobs()
    for job in jobs:
        held.hold(job)
    any_queue: Any = queue
    isolation = Isolation(
        any_queue,
        held,
        worker="w1",
        is_quiet=lambda: not noise,
        changed=asyncio.Event(),
        stopping=asyncio.Event(),
        unreachable=lambda error: None,
    )
    return isolation, held


async def test_what_has_ended_but_is_still_worked_on_is_waited_for() -> None:
    """A step that goes on with a job that was cancelled; a grammar that is still being compiled."""
    noise, queue, suspect = ["step"], Queue(), make_held(aside=True)
    isolation, _ = make_isolation(queue, suspect, make_held("over", ended=True), noise=noise)
    admitted = asyncio.create_task(isolation.admit(suspect))
    await asyncio.sleep(0.3)
    assert (admitted.done(), queue.calls) == (False, [])
    noise.clear()
    assert await asyncio.wait_for(admitted, 10) is True
    assert (queue.calls, suspect.aside) == (["begin"], False)

    noise.append("step")
    over = asyncio.create_task(isolation.over(suspect))
    suspect.ended = True
    await asyncio.sleep(0.3)
    assert not over.done()
    noise.clear()
    await asyncio.wait_for(over, 10)


async def test_a_suspect_that_is_another_s_by_now_is_not_begun() -> None:
    suspect = make_held(aside=True)
    isolation, held = make_isolation(Queue(begins=False), suspect)
    assert await isolation.admit(suspect) is False
    assert (suspect.ended, len(held)) == (True, 0)


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
async def test_a_cancellation_as_it_begins_is_heard(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, suspect = Queue(), make_held(aside=True)
    isolation, held = make_isolation(queue, suspect)

    async def begin(worker: str, job_id: JobId, attempt: int) -> bool:
        held.cancel(suspect.request_id)
        return True

    if moment == "before":
        held.cancel(suspect.request_id)
    else:
        monkeypatch.setattr(queue, "begin", begin)
    assert await isolation.admit(suspect) is False
    assert (queue.calls, len(held)) == (["release"], 0)
