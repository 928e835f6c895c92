"""A worker that is told to stop: what runs ends or is handed back, in time, however Redis is."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from tests.tidemill.servers import running, valkey_binary
from tests.worker.factories import FakeEngine, Place, eventually, make_job, running_worker
from tests.worker.test_service import result_of, undisturbed
from tidemill.client import Client
from tidemill.jobs import Status
from tidemill.moves import CancelOutcome, JobState


async def test_a_drain_finishes_what_runs_and_leaves_what_waits(place: Place, client: Client) -> None:
    jobs = [make_job(f"Mill {n}") for n in range(8)]
    async for _ in client.submit_many(jobs):
        pass
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, capacity=4) as worker:
        await eventually(lambda: len(engine.seen) == 4)
        worker.service.request_stop()
        engine.free()
        assert await asyncio.wait_for(worker.task, 20) is True
    depth = await client.depth()
    assert (depth.waiting, depth.running) == (4, 0)
    statuses = [(await client.status(job.id)).state for job in jobs]
    assert statuses.count(JobState.DONE) == 4
    assert [(await client.status(job.id)).attempt for job in jobs].count(0) == 4


async def test_what_does_not_fit_the_grace_period_goes_on_elsewhere(place: Place, client: Client) -> None:
    """The second worker takes up the tokens of the first: none is computed twice, none is missing."""
    job = make_job(stream=True, params={"max_tokens": 30})
    first = FakeEngine(paced=True)
    async with running_worker(place, name="w1", engine=first, grace_period=0.05) as worker:
        await client.submit(job)
        first.allow(9)
        await eventually(lambda: first._generated == 9)
        assert await worker.stop() is True
    view = await client.status(job.id)
    assert (view.state, view.checkpointed_tokens, view.failures) == (JobState.WAITING, 9, 0)
    second = FakeEngine()
    async with running_worker(place, name="w2", engine=second):
        result = await result_of(client, job)
        deltas = [delta async for delta in client.stream(job.id)]
    assert (result.token_ids, result.text) == undisturbed(job)
    assert (result.worker, second._generated) == ("w2", 21)
    assert [token for delta in deltas for token in delta.token_ids] == list(result.token_ids)
    assert "".join(delta.text for delta in deltas) == result.text


async def test_a_second_signal_releases_at_once(place: Place, client: Client) -> None:
    job = make_job(params={"max_tokens": 30})
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, grace_period=600.0) as worker:
        await client.submit(job)
        engine.allow(3)
        await eventually(lambda: engine._generated == 3)
        assert await worker.stop(at_once=True) is True
    view = await client.status(job.id)
    assert (view.state, view.checkpointed_tokens, view.failures) == (JobState.WAITING, 3, 0)


async def test_a_drain_ends_though_redis_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing while the server is down must not hang (bullmq#2430)."""
    monkeypatch.setattr("tidemill_worker.closing.CLOSING_TIME", 0.5)
    with running(valkey_binary()) as server:
        place = Place(server.url, "gone")
        engine = FakeEngine(paced=True)
        async with running_worker(place, engine=engine, grace_period=0.1) as worker, place.client() as client:
            await client.submit(make_job())
            await eventually(lambda: engine.seen)
            await asyncio.to_thread(server.kill)
            engine.free()
            assert await asyncio.wait_for(worker.stop(), 20) is False


async def test_signals_while_redis_hangs_amid_a_claim_end_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice, and in time; what was held is nobody else's yet, and lost to nobody."""
    monkeypatch.setattr("tidemill_worker.closing.CLOSING_TIME", 0.5)
    monkeypatch.setattr("tidemill_worker.leases.JOIN_TIMEOUT", 0.1)
    with running(valkey_binary()) as server:
        place = Place(server.url, "hangs")
        engine = FakeEngine(paced=True)
        job = make_job()
        async with (
            running_worker(place, engine=engine, grace_period=60.0) as worker,
            place.client() as client,
        ):
            await client.submit(job)
            await eventually(lambda: engine.seen)
            assert server.process is not None
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.1)  # some call or other is on its way by now
            began = time.monotonic()
            worker.service.request_stop()
            worker.service.request_stop()
            assert await asyncio.wait_for(worker.task, 8) is False
            assert worker.service.stop_by is not None
            assert worker.service.stop_by - began < 60.0  # nobody waits for the grace period now
            server.process.send_signal(signal.SIGCONT)
            view = await client.status(job.id)
            assert (view.state, view.failures) == (JobState.RUNNING, 0)


async def test_a_running_job_can_be_cancelled_while_its_worker_drains(place: Place, client: Client) -> None:
    job = make_job(params={"max_tokens": 50})
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, grace_period=60.0) as worker:
        await client.submit(job)
        engine.allow(3)
        await eventually(lambda: engine._generated == 3)
        worker.service.request_stop()
        assert await client.cancel(job.id) is CancelOutcome.REQUESTED
        result = await result_of(client, job)
        assert (result.status, result.token_ids) == (Status.CANCELLED, undisturbed(job)[0][:3])
        assert await asyncio.wait_for(worker.task, 20) is True
