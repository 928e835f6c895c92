"""A worker that is told to stop: what runs ends or is handed back, in time, however Redis is."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.tidemill.servers import running, valkey_binary
from tests.worker.factories import FakeEngine, Place, eventually, make_held, make_job, running_worker
from tests.worker.hanging import HangingEngine
from tests.worker.test_service import result_of, undisturbed
from tidemill.client import Client
from tidemill.errors import QueueUnavailable
from tidemill.jobs import Status
from tidemill.moves import CancelOutcome, JobState, Renewal
from tidemill_worker.admission import Admission
from tidemill_worker.closing import Closing
from tidemill_worker.held import HeldJob, HeldJobs
from tidemill_worker.service import EXIT_TIME


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
    monkeypatch.setattr("tidemill_worker.closing.RECORDING_TIME", 0.5)
    monkeypatch.setattr("tidemill_worker.closing.HAND_BACK_TIME", 0.5)
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
    monkeypatch.setattr("tidemill_worker.closing.RECORDING_TIME", 0.5)
    monkeypatch.setattr("tidemill_worker.closing.HAND_BACK_TIME", 0.5)
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


async def test_a_step_that_outlives_the_stop_does_no_harm(
    place: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given one that ends, with the job's last token, when there is nobody left to take that in."""
    monkeypatch.setattr("tidemill_worker.engine_thread.JOIN_TIMEOUT", 0.05)
    job = make_job(params={"max_tokens": 1})
    engine = HangingEngine()
    async with running_worker(place, engine=engine, grace_period=0.0) as worker:
        writer = worker.service._writer
        shut_down = writer.shutdown

        def shut_down_too_early() -> None:
            shut_down()
            engine.free()
            worker.service.engine._thread.join(10)

        monkeypatch.setattr(writer, "shutdown", shut_down_too_early)
        await client.submit(job)
        await eventually(engine.stepping.is_set)
        assert await worker.stop() is True
    view = await client.status(job.id)
    assert (view.state, view.failures) == (JobState.WAITING, 0)


async def test_a_thread_that_hangs_does_not_spoil_the_stop(
    place: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was at is handed back, and little time left to it: until then the loop waits for it."""
    monkeypatch.setattr("tidemill_worker.closing.RECORDING_TIME", 0.2)
    begun, let_go = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        let_go.wait()

    monkeypatch.setattr(Admission, "prepare", hang)
    job = make_job()
    async with running_worker(place, grace_period=0.0) as worker:
        service = worker.service
        await client.submit(job)
        await eventually(begun.is_set)
        assert not service.has_ended_well
        try:
            assert await worker.stop() is True
            assert service.has_ended_well
            assert service.stop_by is not None and service.stop_by <= time.monotonic() + EXIT_TIME
        finally:
            let_go.set()
    view = await client.status(job.id)
    assert (view.state, view.failures) == (JobState.WAITING, 0)


@dataclass
class Queue:
    """Refuses as often as it is told to."""

    num_releases_refused: int = 0
    is_left: bool = True
    released: list[str] = field(default_factory=list)

    async def release(self, worker: str, renewals: Sequence[Renewal]) -> None:
        if self.num_releases_refused > 0:
            self.num_releases_refused -= 1
            raise QueueUnavailable("busy")
        self.released += [renewal.job_id for renewal in renewals]

    async def remove_consumer(self, worker: str) -> None:
        if not self.is_left:
            raise QueueUnavailable("busy")


def make_closing(
    queue: Any, *jobs: HeldJob, engine_hangs: Callable[[], bool] = lambda: False
) -> tuple[Closing, HeldJobs]:
    """Of a worker whose tasks and threads have ended."""
    held = HeldJobs()
    for job in jobs:
        held.hold(job)

    async def over() -> None:
        """There is nothing left to do."""

    closing = Closing(
        queue,
        held,
        worker="w1",
        grace_period=0.0,
        changed=asyncio.Event(),
        release=asyncio.Event(),
        claiming=asyncio.create_task(over()),
        announcing=asyncio.create_task(over()),
        stop_threads=lambda: None,
        may_hand_back=lambda: True,
        engine_hangs=engine_hangs,
    )
    return closing, held


async def test_results_that_cannot_be_recorded_take_no_time_from_the_hand_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given a Redis that takes no results, and a hand-back only at the fifth time."""
    monkeypatch.setattr("tidemill_worker.closing.RECORDING_TIME", 0.1)
    queue = Queue(num_releases_refused=4)
    closing, held = make_closing(queue, make_held("unrecorded", ended=True), make_held("live"))
    assert await closing.run() is False
    assert queue.released == ["live"]
    assert len(held) == held.num_unrecorded == 1


@pytest.mark.parametrize("jobs", [[], [make_held("live")]], ids=["none", "one"])
async def test_who_has_handed_back_all_leaves_nothing_behind(
    jobs: list[HeldJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though Redis has not heard that it leaves: that costs nobody a job, and so is no error."""
    monkeypatch.setattr("tidemill_worker.closing.HAND_BACK_TIME", 0.3)
    queue = Queue(is_left=False)
    closing, held = make_closing(queue, *jobs)
    with capture_logs() as logs:
        assert await closing.run() is True
    assert queue.released == [job.id for job in jobs]
    assert len(held) == 0
    assert "error" not in [entry["log_level"] for entry in logs]


@pytest.mark.parametrize(
    ("engine_hangs", "released"), [(False, ["suspect", "other"]), (True, ["other"])], ids=["ended", "hangs"]
)
async def test_a_suspect_that_an_engine_hangs_over_is_not_handed_back(
    engine_hangs: bool, released: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncounted, it would go from worker to worker, each of which is told to stop before it stalls."""
    monkeypatch.setattr("tidemill_worker.closing.RECORDING_TIME", 0.1)
    monkeypatch.setattr("tidemill_worker.closing.HAND_BACK_TIME", 0.3)
    queue = Queue()
    suspect, other = make_held("suspect", alone=True), make_held("other")
    closing, held = make_closing(queue, suspect, other, engine_hangs=lambda: engine_hangs)
    assert await closing.run() is not engine_hangs
    assert queue.released == released
    assert len(held) == engine_hangs


async def test_a_suspect_whose_step_was_only_slow_is_handed_back_after_all() -> None:
    """Else its attempt would count, and bury it for a step of a few seconds."""
    queue, looks = Queue(), iter([True, True, False])
    closing, held = make_closing(queue, make_held("suspect", alone=True), engine_hangs=lambda: next(looks))
    assert await closing.run() is True
    assert (queue.released, len(held)) == (["suspect"], 0)
