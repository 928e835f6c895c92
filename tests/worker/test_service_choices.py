"""A whole worker on a real server: jobs of several generations, and their logprobs, whoever takes them up."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest

from tests.worker.factories import (
    FakeEngine,
    Place,
    eventually,
    expected_tokens,
    make_job,
    make_tokenizer,
    running_worker,
)
from tests.worker.scripted import ranked
from tests.worker.test_metrics import value
from tidemill.client import Client
from tidemill.jobs import Choice, Delta, FinishReason, Job, Result, Status
from tidemill.moves import JobState
from tidemill.params import StructuredOutputs
from tidemill_worker.answers import Answers
from tidemill_worker.engine import StepOutput
from tidemill_worker.grammar import CompiledGrammar, GrammarCompiler
from tidemill_worker.held import HeldJob
from tidemill_worker.token_logprobs import on_wire


def make_wide_job(*, stream: bool = False, **params: object) -> Job:
    wide = {"n": 3, "max_tokens": 20, "temperature": 1.0, "logprobs": 2}
    return make_job(stream=stream, params=wide | params)


async def result_of(client: Client, job: Job) -> Result:
    return await client.result(job.id, timeout=15)


def assert_undisturbed(result: Result, job: Job) -> None:
    """Each generation is what the engine says of it, with the logprobs of each of its tokens."""
    tokenizer = make_tokenizer()
    assert len(result.choices) == job.params.n
    for choice in result.choices:
        tokens = expected_tokens(job, job.params.max_tokens, choice.index)
        assert (choice.token_ids, choice.text) == (tokens, tokenizer.decode(tokens))
        assert choice.logprobs == on_wire((ranked(token, 2) for token in tokens), tokenizer.token_text)
        assert choice.finish_reason is FinishReason.LENGTH
    assert result.usage.completion_tokens == job.params.n * job.params.max_tokens
    assert result.usage.prompt_tokens == len(tokenizer.prompt_token_ids(job))


def assert_told(deltas: list[Delta], choices: tuple[Choice, ...]) -> None:
    """The pieces of each generation are its whole text, tokens and logprobs, once."""
    position = 0
    for delta in deltas:
        assert delta.index == position
        position += len(delta.token_ids)
    for choice in choices:
        own = [delta for delta in deltas if delta.choice == choice.index]
        assert "".join(delta.text for delta in own) == choice.text
        assert sum((delta.token_ids for delta in own), ()) == choice.token_ids
        assert sum((delta.logprobs for delta in own), ()) == choice.logprobs


async def test_all_generations_of_a_job_are_in_its_result(place: Place, client: Client) -> None:
    job = make_wide_job()
    async with running_worker(place) as worker:
        await client.submit(job)
        result = await result_of(client, job)
        assert_undisturbed(result, job)
        assert len({choice.token_ids for choice in result.choices}) == 3
        await eventually(
            lambda: value(worker.metrics, "vllm:request_success_total", finished_reason="length") == 3
        )
        assert value(worker.metrics, "vllm:request_params_n_sum") == 3


async def test_a_worker_counts_generations_when_it_looks_for_more(place: Place, client: Client) -> None:
    """Given jobs wide enough to fill it, then it leaves the rest to others, until there is room again."""
    wide = [make_wide_job(n=8) for _ in range(3)]
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, capacity=8) as worker:
        await client.submit(wide[0])
        await eventually(lambda: len(engine.seen) == 1)
        assert (worker.service.held.num_live, worker.service.held.num_generations) == (1, 8)
        await client.submit(wide[1])
        await client.submit(wide[2])
        engine.allow(19)
        await eventually(lambda: engine._steps == 19)
        assert (await client.depth()).waiting == 2
        engine.free()
        for job in wide:
            assert_undisturbed(await result_of(client, job), job)


async def test_a_grammar_that_takes_long_to_compile_holds_up_no_other_job(
    place: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, compile_at_once = Event(), Event(), GrammarCompiler.compile

    def compile_slowly(compiler: GrammarCompiler, outputs: StructuredOutputs) -> CompiledGrammar:
        begun.set()
        assert go_on.wait(20)
        return compile_at_once(compiler, outputs)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    slow = make_job(params={"structured_outputs": {"regex": "["}})
    async with running_worker(place):
        try:
            await client.submit(slow)
            await eventually(begun.is_set)
            for other in (make_job("Mill"), make_job('the word "structured_outputs"')):
                await client.submit(other)
                assert (await result_of(client, other)).status is Status.SUCCEEDED
        finally:
            go_on.set()
        assert (await result_of(client, slow)).status is Status.FAILED


async def test_an_answer_that_takes_long_to_write_holds_up_no_step(
    place: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest, with logprobs of many generations, takes a second."""
    begun, go_on, write_at_once = Event(), Event(), Answers.generated

    def write_slowly(answers: Answers, held: HeldJob, output: StepOutput) -> Result:
        begun.set()
        assert go_on.wait(20)
        return write_at_once(answers, held, output)

    monkeypatch.setattr(Answers, "generated", write_slowly)
    engine, jobs = FakeEngine(), [make_wide_job(), make_wide_job()]
    async with running_worker(place, engine=engine):
        try:
            await client.submit(jobs[0])
            await eventually(begun.is_set)
            await client.submit(jobs[1])
            await eventually(lambda: engine._generated == 2 * 60)
        finally:
            go_on.set()
        for job in jobs:
            assert_undisturbed(await result_of(client, job), job)


async def test_an_answer_that_cannot_be_written_stops_the_worker(
    place: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a bug, and the job's lease lapses: its attempt counts."""
    monkeypatch.setattr(Answers, "generated", lambda *_: 1 / 0)
    async with running_worker(place) as worker:
        await client.submit(make_wide_job())
        assert await asyncio.wait_for(worker.task, 20) is False


async def test_all_generations_are_streamed(place: Place, client: Client) -> None:
    job = make_wide_job(stream=True)
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, renewal=60.0):
        await client.submit(job)
        engine.allow(5)
        deltas = []
        async for delta in client.stream(job.id, timeout=15):
            deltas.append(delta)
            if sum(len(delta.token_ids) for delta in deltas) == 15:
                engine.free()
        result = await result_of(client, job)
    assert_undisturbed(result, job)
    assert_told(deltas, result.choices)
    assert {delta.choice for delta in deltas[:3]} == {0, 1, 2}


async def test_what_one_worker_began_another_goes_on_with(place: Place, client: Client) -> None:
    """No token of any generation is computed twice, none is missing, and the stream has no seam."""
    job = make_wide_job(stream=True)
    first, second = FakeEngine(paced=True), FakeEngine()
    async with running_worker(place, name="w1", engine=first, grace_period=0.05) as worker:
        await client.submit(job)
        first.allow(7)
        await eventually(lambda: first._generated == 21)
        assert await worker.stop() is True
    view = await client.status(job.id)
    assert (view.state, view.checkpointed_tokens) == (JobState.WAITING, 21)
    async with running_worker(place, name="w2", engine=second):
        result = await result_of(client, job)
        deltas = [delta async for delta in client.stream(job.id)]
    assert_undisturbed(result, job)
    assert (result.worker, second._generated) == ("w2", 60 - 21)
    assert_told(deltas, result.choices)


async def test_a_generation_that_had_ended_stays_ended(place: Place, client: Client) -> None:
    """Given a job of which one generation has stopped, when another worker takes it up, then that one is
    as it was, and only the others go on."""
    last = expected_tokens(make_wide_job(), 6, choice=1)[-1]
    job = make_wide_job(stream=True, stop_token_ids=[last])
    first, second = FakeEngine(paced=True), FakeEngine()
    async with running_worker(place, name="w1", engine=first, grace_period=0.05) as worker:
        await client.submit(job)
        first.allow(8)
        await eventually(lambda: first._steps == 8)
        assert await worker.stop() is True
    generated = first._generated
    assert generated == 8 + 6 + 8
    async with running_worker(place, name="w2", engine=second):
        result = await result_of(client, job)
        deltas = [delta async for delta in client.stream(job.id)]
    stopped = result.choices[1]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, last)
    assert stopped.token_ids == expected_tokens(job, 6, choice=1)
    assert result.usage.completion_tokens == generated + second._generated
    assert_told(deltas, result.choices)


async def test_a_cancelled_job_keeps_what_each_generation_had(place: Place, client: Client) -> None:
    job = make_wide_job()
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, renewal=0.02):
        await client.submit(job)
        engine.allow(4)
        await eventually(lambda: engine._generated == 12)
        await client.cancel(job.id)
        result = await result_of(client, job)
    assert result.status is Status.CANCELLED
    for choice in result.choices:
        assert choice.finish_reason is FinishReason.CANCELLED
        assert choice.token_ids == expected_tokens(job, 4, choice.index)
    assert result.usage.completion_tokens == 12


async def test_logprobs_of_the_prompt_are_in_the_result(place: Place, client: Client) -> None:
    job = make_job(params={"prompt_logprobs": 1})
    async with running_worker(place):
        await client.submit(job)
        result = await result_of(client, job)
    tokenizer = make_tokenizer()
    _, *prompt = tokenizer.prompt_token_ids(job)
    assert result.prompt_logprobs == (
        None,
        *on_wire((ranked(token, 1) for token in prompt), tokenizer.token_text),
    )
