"""A whole worker with the real engine: deadlines, charges, and what it claims while some have to wait."""

from __future__ import annotations

import asyncio
from functools import partial
from threading import Event

import pytest

from tests.worker.factories import Place, eventually, make_job, make_limits, make_tokenizer, running_worker
from tests.worker.paced import make_paced_engine
from tests.worker.test_metrics import value
from tidemill.client import Client
from tidemill.errors import ErrorCode
from tidemill.jobs import FinishReason, Job, Result, Status
from tidemill.keys import JobField, QueueKeys
from tidemill.params import StructuredOutputs
from tidemill_worker.grammar import CompiledGrammar, GrammarCompiler

LIMITS = make_limits(max_model_len=4000, max_total_tokens=4000)


async def result_of(client: Client, job: Job) -> Result:
    return await client.result(job.id, timeout=15)


def assert_expired(result: Result, deadline: float) -> None:
    assert (result.status, result.finish_reason) == (Status.EXPIRED, FinishReason.EXPIRED)
    assert result.error is not None
    assert (result.error.code, result.error.limit) == (ErrorCode.DEADLINE_EXCEEDED, deadline)
    assert result.error.message == f"deadline: {deadline:g} s passed before the job finished"


async def test_a_deadline_passes_in_mid_generation(place: Place, client: Client) -> None:
    """It is an error of its own, not a short generation of finish_reason length; no renewal is waited
    for, and the text goes as far as the tokens."""
    job = make_job(deadline=0.4, stream=True, params={"max_tokens": 3000})
    engine = make_paced_engine(patience=0.005)
    async with running_worker(place, engine=engine, renewal=60.0, limits=LIMITS) as worker:
        await client.submit(job)
        result = await result_of(client, job)
        deltas = [delta async for delta in client.stream(job.id)]
        await eventually(lambda: not engine.has_unfinished)
        await eventually(
            lambda: value(worker.metrics, "vllm:request_success_total", finished_reason="abort") == 1
        )
        assert value(worker.metrics, "vllm:e2e_request_latency_seconds_count") == 0
    assert_expired(result, 0.4)
    assert 0 < len(result.token_ids) < 3000
    assert result.text == make_tokenizer().decode(result.token_ids)
    assert "".join(delta.text for delta in deltas) == result.text
    assert result.timings.decode > 0


async def test_a_deadline_passes_while_the_job_waits_in_the_engine(place: Place, client: Client) -> None:
    """Given one place and a job in it, then the one behind it costs the model nothing."""
    first = make_job(params={"max_tokens": 3000})
    late = make_job(deadline=0.3)
    engine = make_paced_engine(patience=0.005, max_num_seqs=1)
    async with running_worker(place, engine=engine, renewal=60.0, limits=LIMITS):
        await client.submit(first)
        await eventually(lambda: engine.runner.names)
        await client.submit(late)
        assert_expired(await result_of(client, late), 0.3)
        assert engine.runner.names == {f"{first.id}/1"}


async def charge_of(place: Place, client: Client, job: Job) -> int:
    """Units that the ended job was charged; no token came of it."""
    assert (await result_of(client, job)).usage.completion_tokens == 0
    return int(await client._redis.hget(QueueKeys(place.queue).job(job.id), JobField.SERVED) or 0)


async def test_who_is_cancelled_amid_its_prompt_is_charged_for_it(place: Place, client: Client) -> None:
    """Who waits for its turn meanwhile is not."""
    begun, behind = (make_job(None, prompt_token_ids=[100 + number] * 40) for number in range(2))
    engine = make_paced_engine(max_num_seqs=1, max_num_batched_tokens=8)
    async with running_worker(place, engine=engine, renewal=0.02, limits=LIMITS) as worker:
        await client.submit(begun)
        await eventually(lambda: engine.runner.names)
        await client.submit(behind)
        await eventually(lambda: worker.service.held.num_by_priority["normal"] == 2)
        for job in (begun, behind):
            await client.cancel(job.id)
        assert [await charge_of(place, client, job) for job in (begun, behind)] == [40, 1]


async def test_whose_deadline_passes_amid_its_prompt_is_charged_for_it(place: Place, client: Client) -> None:
    """Given a token a step, then one has not come far by then, and the one behind it nowhere."""
    begun, behind = (
        make_job(None, prompt_token_ids=[token] * 3000, deadline=deadline)
        for token, deadline in ((100, 0.4), (101, 0.1))
    )
    engine = make_paced_engine(patience=0.005, max_num_seqs=1, max_num_batched_tokens=1)
    async with running_worker(place, engine=engine, renewal=60.0, limits=LIMITS):
        await client.submit(begun)
        await eventually(lambda: engine.runner.names)
        await client.submit(behind)
        assert [await charge_of(place, client, job) for job in (begun, behind)] == [3000, 1]


async def test_a_deadline_passes_before_the_job_is_prepared(
    place: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a grammar that takes long, then one behind it that is late does not wait for its own turn."""
    begun, go_on = Event(), Event()
    compile_at_once = GrammarCompiler.compile

    def compile_slowly(compiler: GrammarCompiler, outputs: StructuredOutputs) -> CompiledGrammar:
        begun.set()
        assert go_on.wait(20)
        return compile_at_once(compiler, outputs)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    slow, late = (
        make_job(deadline=deadline, params={"structured_outputs": {"regex": "x"}}) for deadline in (None, 0.3)
    )
    engine = make_paced_engine(patience=0.0)
    async with running_worker(place, engine=engine):
        try:
            await client.submit(slow)
            await eventually(begun.is_set)
            await client.submit(late)
            assert_expired(await result_of(client, late), 0.3)
        finally:
            go_on.set()
        await result_of(client, slow)
        assert f"{late.id}/1" not in engine.runner.names


async def test_a_worker_claims_again_as_soon_as_its_engine_has_taken_in_what_waited(
    place: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given prompts that take several steps to admit, then more is claimed though no job has ended."""
    monkeypatch.setattr("tidemill_worker.intake.URGENT_INTERVAL", 60.0)
    jobs = [make_job(None, prompt_token_ids=[100 + n] * 8, params={"max_tokens": 900}) for n in range(10)]
    engine = make_paced_engine(max_num_seqs=16, max_num_batched_tokens=16)
    async with running_worker(place, engine=engine, capacity=16, limits=LIMITS) as worker:
        for job in jobs[:6]:
            await client.submit(job)
        held = worker.service.held
        await eventually(lambda: held.num_by_priority["normal"] == 6)  # five are with the engine, at least
        engine.runner.allow(2)  # the first step may have seen the first job alone
        await eventually(lambda: worker.service.engine.stats.num_waiting > 0)
        for job in jobs[6:]:
            await client.submit(job)
        assert held.num_live == 6
        engine.runner.allow(20)
        await eventually(lambda: held.num_live == 10)


async def test_an_engine_whose_jobs_end_with_their_first_step_never_runs_dry(
    place: Place, client: Client
) -> None:
    """Given prompts of which a step takes in twenty, each with an answer of one token, then during every
    step there is something ready for the next one."""
    jobs = [make_job(None, prompt_token_ids=[100 + n] * 16, params={"max_tokens": 1}) for n in range(150)]
    engine = make_paced_engine(max_num_seqs=64, max_num_batched_tokens=20 * 16)
    async with running_worker(place, engine=engine, capacity=72, claim_ahead=8) as worker:
        begun = engine.runner.names
        await client.submit(jobs[0])
        await eventually(lambda: begun)
        async for _ in client.submit_many(jobs[1:]):
            pass
        await eventually(lambda: worker.service.held.num_live == 72)
        num_claimed = partial(value, worker.metrics, "tidemill_jobs_claimed_total")
        while (num_begun := len(begun)) < len(jobs):
            await eventually(lambda num_begun=num_begun: num_claimed() > num_begun)
            engine.runner.allow(1)
            await eventually(lambda num_begun=num_begun: len(begun) > num_begun)


async def test_a_worker_short_of_memory_leaves_to_others_what_it_cannot_run(
    place: Place, client: Client
) -> None:
    """Given more claimed jobs than memory lets run, some of them preempted, then nothing of the same
    priority is claimed in the place of those that end; what is higher still is."""
    jobs = [
        make_job(None, prompt_token_ids=[100 + number] * 5, params={"max_tokens": 16}) for number in range(20)
    ]
    engine = make_paced_engine(num_blocks=12, max_num_seqs=8)
    async with running_worker(place, engine=engine, capacity=9, claim_ahead=1) as worker:
        for job in jobs:
            await client.submit(job)
        held = worker.service.held
        await eventually(lambda: held.num_live == 9)
        async with asyncio.timeout(10):
            while held.num_live > 5:
                engine.runner.allow(1)
                steps = engine.runner.num_steps + 1
                await eventually(lambda steps=steps: engine.runner.num_steps >= steps)
        urgent = make_job(priority="high")
        await client.submit(urgent)
        await eventually(lambda: held.num_by_priority["high"] == 1)
        assert engine.stats().num_preemptions > 0
        depth = await client.depth()
        assert (depth.waiting, held.num_by_priority["normal"]) == (11, 5)
        engine.free()
        for job in (*jobs, urgent):
            assert (await result_of(client, job)).status is Status.SUCCEEDED
