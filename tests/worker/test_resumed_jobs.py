"""A job that is cut off and taken up by another worker: the same answer, bit for bit, as if undisturbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.worker.factories import MODEL, make_admission, make_claim, make_job, make_limits, make_tokenizer
from tests.worker.model.factories import Bench, load, make_tiny_llama
from tidemill.jobs import Delta, FinishReason, Job, Result, Status, Timings
from tidemill_worker.answers import Answers
from tidemill_worker.engine import Engine
from tidemill_worker.held import HeldJobs
from tidemill_worker.request import Request

ANSWERS = Answers(model=MODEL, worker="w1")
EVERYTHING: dict[str, Any] = {
    "n": 3,
    "seed": 5,
    "max_tokens": 12,
    "temperature": 0.8,
    "top_p": 0.95,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "echo": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """As many tokens as the tokenizer has."""
    size = make_tokenizer().vocab_size
    return load(make_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=size))


@dataclass
class Attempt:
    """One worker's try at a job: what it stored, and the answer if it came so far."""

    deltas: tuple[Delta, ...]
    result: Result | None


MakeEngine = Callable[[], Engine]


@pytest.fixture
def make_engine(model: PreTrainedModel) -> MakeEngine:
    def make() -> Engine:
        engine = Bench(model).engine
        engine.end_of_text = frozenset({1})
        return engine

    return make


def attempt(
    job: Job, engine: Engine, *, checkpoint: Sequence[Delta] = (), number: int = 1, steps: int = 10_000
) -> Attempt:
    """Go on from `checkpoint` for at most so many steps, storing all that each brings."""
    admission = make_admission(limits=make_limits(max_model_len=128))
    claim = make_claim(job, attempt=number, checkpoint=tuple(checkpoint))
    held = HeldJobs()
    holding = admission.hold(claim)
    held.hold(holding)
    prepared = admission.prepare(claim, holding)
    if isinstance(prepared, Result):
        return Attempt((), prepared)
    assert isinstance(prepared, Request)
    engine.add(prepared)
    stored: list[Delta] = []
    result = None
    for _ in range(steps):
        if result is not None:
            break
        for holder, output in held.record(engine.step()):
            if output.finished:
                result = ANSWERS.generated(holder, output)
        renewals = held.renewals(everything=True)
        stored += [Delta.from_wire(delta.to_wire()) for renewal in renewals for delta in renewal.deltas]
        held.confirm(renewals)
    return Attempt(tuple(stored), result)


def comparable(result: Result | None) -> Result:
    """What of a result does not depend on who made it when."""
    assert result is not None
    usage = result.usage.model_copy(update={"cached_tokens": 0})
    return result.model_copy(update={"attempts": 0, "timings": Timings(), "usage": usage})


def assert_told(deltas: Sequence[Delta], result: Result) -> None:
    for choice in result.choices:
        own = [delta for delta in deltas if delta.choice == choice.index]
        assert "".join(delta.text for delta in own) == choice.text
        assert sum((delta.token_ids for delta in own), ()) == choice.token_ids
        assert sum((delta.logprobs for delta in own), ()) == (choice.logprobs or ())


def make_full_job(**params: Any) -> Job:
    return make_job("The tide turns the mill", params=EVERYTHING | params)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 11, 12])
def test_cut_off_anywhere_a_job_ends_as_if_undisturbed(make_engine: MakeEngine, steps: int) -> None:
    """Logprobs of prompt and output, texts, finish reasons and cost included."""
    job = make_full_job()
    undisturbed = attempt(job, make_engine())
    first = attempt(job, make_engine(), steps=steps)
    second = attempt(job, make_engine(), checkpoint=first.deltas, number=2)
    assert comparable(second.result) == comparable(undisturbed.result)
    assert second.result is not None
    assert_told((*first.deltas, *second.deltas), second.result)


def test_cut_off_again_and_again_too(make_engine: MakeEngine) -> None:
    job = make_full_job()
    deltas: tuple[Delta, ...] = ()
    for number in range(1, 30):
        made = attempt(job, make_engine(), checkpoint=deltas, number=number, steps=2)
        deltas += made.deltas
        if made.result is not None:
            break
    assert number > 3
    assert comparable(made.result) == comparable(attempt(job, make_engine()).result)


def test_a_job_that_was_complete_is_scored_once_more_for_its_prompt_alone(make_engine: MakeEngine) -> None:
    """Its worker died before it recorded the result: all that is missing is the prompt's logprobs."""
    job = make_full_job()
    first = attempt(job, make_engine())
    engine = make_engine()
    second = attempt(job, engine, checkpoint=first.deltas, number=2)
    assert comparable(second.result) == comparable(first.result)
    assert (second.deltas, engine.stats().generation_tokens) == ((), 0)


def test_without_them_it_is_answered_at_once(make_engine: MakeEngine) -> None:
    job = make_full_job(prompt_logprobs=None)
    first = attempt(job, make_engine())
    engine = make_engine()
    second = attempt(job, engine, checkpoint=first.deltas, number=2)
    assert comparable(second.result) == comparable(first.result)
    assert not engine.has_unfinished
    assert engine.stats().num_steps == 0


def test_generations_that_end_at_different_times_stay_as_they_ended(make_engine: MakeEngine) -> None:
    """Given a stop token that one of them draws early, when the job is cut off after that, then it keeps
    its end and its reason."""
    plain = attempt(make_full_job(), make_engine()).result
    assert plain is not None
    stop = plain.choices[1].token_ids[3]
    job = make_full_job(stop_token_ids=[stop])
    undisturbed = attempt(job, make_engine()).result
    assert undisturbed is not None
    assert undisturbed.choices[1].finish_reason is FinishReason.STOP
    assert undisturbed.choices[1].stop_reason == stop
    first = attempt(job, make_engine(), steps=7)
    assert first.result is None
    second = attempt(job, make_engine(), checkpoint=first.deltas, number=2)
    assert comparable(second.result) == comparable(undisturbed)


def test_each_generation_is_what_it_would_be_without_its_siblings(make_engine: MakeEngine) -> None:
    """The first of several is the only one of a job of one; all have the same prompt."""
    several = attempt(make_full_job(), make_engine()).result
    single = attempt(make_full_job(n=1), make_engine()).result
    assert several is not None
    assert single is not None
    assert several.choices[0] == single.choices[0]
    assert several.prompt_logprobs == single.prompt_logprobs
    assert len({choice.token_ids for choice in several.choices}) == 3
    assert all(choice.text.startswith("The tide turns the mill") for choice in several.choices)
    assert (several.status, several.usage.prompt_tokens) == (Status.SUCCEEDED, single.usage.prompt_tokens)
