"""A whole worker on a real server, with an engine that has no model: every job, exactly one answer."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from tests.tidemill.servers import running, valkey_binary
from tests.worker.factories import (
    FakeEngine,
    Place,
    RunningWorker,
    eventually,
    expected_tokens,
    make_job,
    make_tokenizer,
    opener,
    running_worker,
)
from tests.worker.test_metrics import value
from tidemill.client import Client
from tidemill.errors import ErrorCode
from tidemill.jobs import FinishReason, Job, JobId, Result, Status
from tidemill.keys import JobField, QueueKeys
from tidemill.moves import CancelOutcome, JobState
from tidemill_worker.admission import Admission
from tidemill_worker.announcer import Announcer
from tidemill_worker.endpoint import Health
from tidemill_worker.health import HealthProbe


async def result_of(client: Client, job: Job | JobId) -> Result:
    return await client.result(job if isinstance(job, str) else job.id, timeout=15)


def undisturbed(job: Job) -> tuple[tuple[int, ...], str]:
    tokens = expected_tokens(job, job.params.max_tokens)
    return tokens, make_tokenizer().decode(tokens)


async def test_every_job_gets_its_own_answer(place: Place, client: Client) -> None:
    jobs = [
        make_job(f"Mill {n}", metadata={"n": str(n)}, params={"max_tokens": 5 + n % 7}) for n in range(60)
    ]
    async with running_worker(place, capacity=8) as worker:
        ids = [job_id async for job_id in client.submit_many(jobs)]
        results = {result.id: result async for result in client.as_completed(ids, timeout=20)}
        for job in jobs:
            result = results[job.id]
            assert (result.token_ids, result.text) == undisturbed(job)
            assert (result.status, result.finish_reason) == (Status.SUCCEEDED, FinishReason.LENGTH)
            assert (result.metadata, result.attempts, result.worker) == (job.metadata, 1, "w1")
            assert result.usage.completion_tokens == job.params.max_tokens
            assert result.usage.prompt_tokens == len(make_tokenizer().prompt_token_ids(job))
        depth = await client.depth()
        assert (depth.total, depth.running) == (0, 0)
        generated = sum(job.params.max_tokens for job in jobs)
        assert value(worker.metrics, "vllm:generation_tokens_total") == generated
        await eventually(
            lambda: value(worker.metrics, "vllm:request_success_total", finished_reason="length") == 60
        )
        assert value(worker.metrics, "vllm:inter_token_latency_seconds_count") == generated - 60
        assert value(worker.metrics, "tidemill_jobs_claimed_total") == 60
        assert await worker.stop() is True


async def test_bad_jobs_harm_no_good_one(place: Place, client: Client) -> None:
    good = [make_job(f"Mill {n}") for n in range(20)]
    other, long, wide = make_job(model="other"), make_job("mill " * 200), make_job(params={"max_tokens": 64})
    strange, broken, never = make_job(None, prompt_token_ids=[9999]), make_job(), make_job("qz" * 20)
    bad = {
        other.id: ErrorCode.MODEL_MISMATCH,
        long.id: ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        wide.id: ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        strange.id: ErrorCode.INVALID_REQUEST,
        broken.id: ErrorCode.UNDECODABLE,
        never.id: ErrorCode.INVALID_REQUEST,  # the engine itself refuses it
    }
    jobs = [*good[:10], other, long, wide, strange, broken, never, *good[10:]]
    async for _ in client.submit_many(jobs):
        pass
    await client._redis.hset(QueueKeys(place.queue).job(broken.id), JobField.PAYLOAD, b"\xff{")
    async with running_worker(place, engine=FakeEngine(max_prompt=20)) as worker:
        for job in good:
            result = await result_of(client, job)
            assert (result.token_ids, result.text) == undisturbed(job)
        for job_id, code in bad.items():
            result = await result_of(client, job_id)
            assert result.status is Status.FAILED
            assert result.error is not None
            assert result.error.code is code
        await eventually(
            lambda: value(worker.metrics, "vllm:request_success_total", finished_reason="error") == len(bad)
        )


async def test_text_streams_while_it_is_generated(place: Place, client: Client) -> None:
    job = make_job(stream=True, params={"max_tokens": 20})
    tokens, text = undisturbed(job)
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, renewal=60.0):
        await client.submit(job)
        shown: list[int] = []
        pieces = []
        engine.allow(5)
        async with asyncio.timeout(15):
            async for delta in client.stream(job.id):
                assert delta.index == len(shown)
                shown += delta.token_ids
                pieces.append(delta.text)
                if len(shown) == 5:
                    engine.free()
        assert tuple(shown) == tokens
        assert "".join(pieces) == text
        assert len(pieces) > 1


async def test_a_running_job_can_be_cancelled(place: Place, client: Client) -> None:
    job, other = make_job(params={"max_tokens": 50}), make_job("Mill", params={"max_tokens": 50})
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, renewal=0.02) as worker:
        await client.submit(job)
        await client.submit(other)
        await eventually(lambda: len(engine.seen) == 2)
        engine.allow(3)
        await eventually(lambda: engine._generated == 6)
        assert await client.cancel(job.id) is CancelOutcome.REQUESTED
        result = await result_of(client, job)
        assert (result.status, result.finish_reason) == (Status.CANCELLED, FinishReason.CANCELLED)
        assert result.token_ids == undisturbed(job)[0][:3]
        assert result.text == make_tokenizer().decode(result.token_ids)
        engine.free()
        assert (await result_of(client, other)).token_ids == undisturbed(other)[0]
        assert f"{job.id}/1" in engine.aborted
        await eventually(
            lambda: value(worker.metrics, "vllm:request_success_total", finished_reason="abort") == 1
        )


async def test_only_as_much_is_claimed_as_there_is_room_for(place: Place, client: Client) -> None:
    jobs = [make_job(f"Mill {n}") for n in range(20)]
    async for _ in client.submit_many(jobs):
        pass
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, capacity=5) as worker:
        await eventually(lambda: worker.service.held.num_live == 5)
        depth = await client.depth()
        assert (depth.running, depth.waiting) == (5, 15)
        engine.free()
        for job in jobs:
            await result_of(client, job)


async def test_a_full_worker_serves_what_may_not_wait(place: Place, client: Client) -> None:
    """Given a worker full of low jobs, when high ones come, then they end first (vllm#40004).

    It takes a few at a time on top, and nothing that is no higher than what it holds.
    """
    low = [make_job(f"Mill {n}", priority="low", params={"max_tokens": 50}) for n in range(5)]
    high = [make_job(f"Tide {n}", priority="high", params={"max_tokens": 3}) for n in range(3)]
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, capacity=4) as worker:
        for job in low:
            await client.submit(job)
        await eventually(lambda: len(engine.seen) == 4)
        for job in high:
            await client.submit(job)
        for count, job in enumerate(high, start=5):
            await eventually(lambda count=count: len(engine.seen) == count)
            assert worker.service.held.num_live == 5
            engine.allow(3)
            assert (await result_of(client, job)).token_ids == undisturbed(job)[0]
        depth = await client.depth()
        assert (depth.running, depth.waiting) == (4, 1)
        engine.free()
        for job in low:
            assert (await result_of(client, job)).token_ids == undisturbed(job)[0]


async def test_idle_workers_share_a_burst(place: Place, client: Client) -> None:
    """One of them has room for all of it."""
    engines = FakeEngine(paced=True), FakeEngine(paced=True)
    async with (
        running_worker(place, name="w1", engine=engines[0], capacity=72),
        running_worker(place, name="w2", engine=engines[1], capacity=72),
    ):
        async with asyncio.timeout(10):
            while (await client._redis.info("clients"))["blocked_clients"] < 2:
                await asyncio.sleep(0.005)
        async for _ in client.submit_many(make_job(f"Mill {n}") for n in range(30)):
            pass
        await eventually(lambda: sum(len(engine.seen) for engine in engines) == 30)
        assert all(engine.seen for engine in engines)


async def test_a_lost_lease_drops_the_work(client: Client, place: Place) -> None:
    """Given a worker that renews too late, when another has taken the job over, then its result does
    not count."""
    job = make_job(params={"max_tokens": 10})
    slow = FakeEngine(paced=True)
    async with running_worker(place, name="slow", engine=slow, capacity=1, lease=0.5, renewal=60.0) as worker:
        await client.submit(job)
        slow.allow(2)
        await eventually(lambda: slow._generated == 2)
        worker.service._leases.stop()
        async with running_worker(place, name="quick", lease=0.5, renewal=0.1):
            result = await result_of(client, job)
            assert result.worker == "quick"
            assert result.attempts > 1
            assert (result.token_ids, result.text) == undisturbed(job)
            slow.free()
            await eventually(lambda: len(worker.service.held) == 0)
        assert await result_of(client, job) == result
        entries = await client._queue.results(client.results, "0")
        assert [entry.id for _, entry in entries] == [job.id]


async def test_a_lost_lease_is_noticed_at_the_renewal(client: Client, place: Place) -> None:
    job = make_job(params={"max_tokens": 10})
    engine = FakeEngine(paced=True)
    with capture_logs() as logs:
        async with running_worker(place, engine=engine, capacity=1, renewal=0.05) as worker:
            await client.submit(job)
            await eventually(lambda: engine.seen)
            await take_away(place, worker)
            await eventually(lambda: f"{job.id}/1" in engine.aborted)
            assert "lease_lost" in [entry["event"] for entry in logs]
            engine.free()
            assert (await result_of(client, job)).token_ids == undisturbed(job)[0]


async def test_a_job_lost_and_claimed_again_starts_anew(client: Client, place: Place) -> None:
    """Given a worker that gets back a job before it knew of the loss, then the two do not mix."""
    job = make_job(params={"max_tokens": 10})
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, renewal=60.0) as worker:
        await client.submit(job)
        engine.allow(3)
        await eventually(lambda: engine._generated == 3)
        await take_away(place, worker)
        await eventually(lambda: engine.seen == [f"{job.id}/1", f"{job.id}/2"])
        assert engine.aborted == [f"{job.id}/1"]
        engine.free()
        result = await result_of(client, job)
        assert (result.token_ids, result.text, result.attempts) == (*undisturbed(job), 2)


async def take_away(place: Place, worker: RunningWorker) -> None:
    """Put the worker's jobs back into the queue behind its back."""
    async with opener(place)() as queue:
        await queue.release("w1", worker.service.held.live_renewals())


async def test_a_broken_engine_stops_the_worker_and_keeps_the_leases(place: Place, client: Client) -> None:
    """Their attempts must count: one of these jobs may be what breaks every worker."""
    token = make_tokenizer()._backend.token_to_id("Z")
    poison, innocent = make_job("Z"), make_job("Mill")
    probe = HealthProbe()
    with capture_logs() as logs:
        async with running_worker(place, engine=FakeEngine(poison=token)) as worker:
            await client.submit(innocent)
            await result_of(client, innocent)
            assert probe() == Health(ok=False, details={"engine": "loading"})
            probe.service = worker.service
            assert probe().ok
            await client.submit(poison)
            assert await asyncio.wait_for(worker.task, 20) is False
            assert probe() == Health(ok=False, details={**probe().details, "engine": "stopped"})
    assert (await client.status(poison.id)).state is JobState.RUNNING
    [failure] = [entry for entry in logs if entry["event"] == "engine_failed"]
    assert failure["log_level"] == "error"


async def test_a_part_that_breaks_apart_from_the_jobs_costs_them_nothing(
    place: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has failed, and stops; but none of its jobs can be the reason."""
    break_down = asyncio.Event()

    async def run(announcer: Announcer) -> NoReturn:
        await break_down.wait()
        raise RuntimeError("a bug")

    monkeypatch.setattr(Announcer, "run", run)
    job = make_job(params={"max_tokens": 50})
    engine = FakeEngine(paced=True)
    with capture_logs() as logs:
        async with running_worker(place, engine=engine) as worker:
            await client.submit(job)
            engine.allow(3)
            await eventually(lambda: engine._generated == 3)
            break_down.set()
            assert await asyncio.wait_for(worker.task, 20) is False
    view = await client.status(job.id)
    assert (view.state, view.checkpointed_tokens, view.failures) == (JobState.WAITING, 3, 0)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["task_failed"]


async def test_a_job_that_breaks_the_intake_costs_it_an_attempt(
    place: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic of native code is no `Exception`. Uncounted, the job would break one worker after another."""

    class Panic(BaseException):
        """As Rust raises it."""

    def prepare(*arguments: object) -> NoReturn:
        raise Panic

    monkeypatch.setattr(Admission, "prepare", prepare)
    job = make_job()
    async with running_worker(place) as worker:
        await client.submit(job)
        assert await asyncio.wait_for(worker.task, 20) is False
    assert (await client.status(job.id)).state is JobState.RUNNING


async def test_the_model_card_is_published(place: Place, client: Client) -> None:
    assert await client.model_card() is None
    async with running_worker(place):
        async with asyncio.timeout(10):
            while (card := await client.model_card()) is None:
                await asyncio.sleep(0.01)
        assert (card.model, card.max_model_len) == ("tiny", 64)


async def test_an_absence_of_redis_loses_nothing() -> None:
    """The engine goes on, results wait, and what was finished meanwhile is recorded once."""
    with running(valkey_binary(), "--appendonly", "yes", "--appendfsync", "always") as server:
        place = Place(server.url, "outage")
        engine = FakeEngine(paced=True)
        jobs = [make_job(f"Mill {n}") for n in range(6)]
        async with running_worker(place, engine=engine, capacity=4) as worker, place.client() as client:
            async for _ in client.submit_many(jobs):
                pass
            await eventually(lambda: len(engine.seen) == 4)
            await asyncio.to_thread(server.kill)
            engine.free()
            await eventually(lambda: worker.service.held.num_unrecorded == 4)
            assert not engine.has_unfinished
            await asyncio.to_thread(server.start)
            for job in jobs:
                result = await client.result(job.id, timeout=30)
                assert (result.token_ids, result.attempts) == (undisturbed(job)[0], 1)
            entries = await client._queue.results(client.results, "0")
            assert sorted(entry.id for _, entry in entries) == sorted(job.id for job in jobs)


async def test_a_cancellation_does_not_wait_for_the_renewal(place: Place, client: Client) -> None:
    job = make_job(params={"max_tokens": 50})
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, renewal=3600.0):
        await client.submit(job)
        engine.allow(3)
        await eventually(lambda: engine._generated == 3)
        assert await client.cancel(job.id) is CancelOutcome.REQUESTED
        assert (await result_of(client, job)).status is Status.CANCELLED


@pytest.mark.parametrize(("fingerprint", "generated"), [("f1", 21), ("f2", 30)])
async def test_a_worker_of_another_build_begins_anew(
    place: Place, client: Client, fingerprint: str, generated: int
) -> None:
    """And one of the same goes on. Nothing is spliced, and the usage is that of one answer."""
    job = make_job(params={"max_tokens": 30})
    first, second = FakeEngine(paced=True), FakeEngine()
    async with running_worker(place, engine=first, grace_period=0.05) as worker:
        await client.submit(job)
        first.allow(9)
        await eventually(lambda: first._generated == 9)
        assert await worker.stop() is True
    async with running_worker(place, name="w2", engine=second, fingerprint=fingerprint):
        result = await result_of(client, job)
    assert (result.token_ids, result.usage.completion_tokens) == (undisturbed(job)[0], 30)
    assert second._generated == generated
