"""The engine over a scripted runner: when a generation ends, what it reports, and who pays for faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import FinishReason, SamplingParams
from tidemill_scheduler import Scheduler, SchedulerConfig, SequenceId, StepPlan
from tidemill_worker.engine import Engine, Generation, Request, StepOutput

EOS = 99
LETTERS = {1: "a", 2: "b", 3: "c", EOS: "<eos>"}


@dataclass
class Script:
    """A runner that says what it was told to, by request id; then 1 for ever."""

    lines: dict[str, list[int]]
    plans: list[StepPlan] = field(default_factory=list)

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> dict[SequenceId, int]:
        self.plans.append(plan)
        sampled = {}
        for row in plan.rows:
            if row.sample:
                line = self.lines.get(generations[row.sequence].request.id, [])
                sampled[row.sequence] = line.pop(0) if line else 1
        return sampled


class Letters:
    """Text of one letter a token, that stops at a string and holds back its first letter."""

    def __init__(self, stop: str | None = None) -> None:
        self.stop, self.all, self.taken = stop, "", 0

    def append(self, token_id: int) -> str | None:
        self.all += LETTERS[token_id]
        if self.stop and self.stop in self.all:
            self.all = self.all.split(self.stop)[0]
            return self.stop
        return None

    def take(self) -> str:
        held_back = self.stop is not None and self.all.endswith(self.stop[0])
        return self._up_to(len(self.all) - held_back)

    def close(self) -> str:
        return self._up_to(len(self.all))

    def _up_to(self, end: int) -> str:
        text, self.taken = self.all[self.taken : end], end
        return text


def make_engine(lines: dict[str, list[int]] | None = None, **config: Any) -> Engine:
    settings: dict[str, Any] = {"num_blocks": 16, "block_size": 4, "max_model_len": 512}
    return Engine(Script(lines or {}), Scheduler(SchedulerConfig(**(settings | config))), frozenset({EOS}))


def make_request(
    name: str, prompt: Sequence[int] = (7, 8, 9), stop: str | None = None, **params: Any
) -> Request:
    return Request(name, prompt, SamplingParams(**({"max_tokens": 5} | params)), 0, Letters(stop))


def run(engine: Engine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_integrity()
    return outputs


def text(outputs: list[StepOutput]) -> str:
    return "".join(output.text for output in outputs)


@pytest.mark.parametrize(
    ("line", "params", "stop", "reason", "stop_reason", "tokens", "expected"),
    [
        ([2, 2, 2, 2, 2, 2], {}, None, FinishReason.LENGTH, None, 5, "bbbbb"),
        ([2, EOS], {}, None, FinishReason.STOP, None, 2, "b"),
        ([2, EOS, 3], {"ignore_eos": True, "max_tokens": 3}, None, FinishReason.LENGTH, None, 3, "b<eos>c"),
        ([2, 3, 2], {"stop_token_ids": (3,)}, None, FinishReason.STOP, 3, 2, "b"),
        ([EOS, 3], {"stop_token_ids": (EOS,)}, None, FinishReason.STOP, EOS, 1, ""),
        ([2, 3, 3], {}, "cc", FinishReason.STOP, "cc", 3, "b"),
        # At once at its limit and at a stop, the generation has stopped by itself.
        ([2, EOS], {"max_tokens": 2}, None, FinishReason.STOP, None, 2, "b"),
        ([2, 3], {"max_tokens": 2}, "c", FinishReason.STOP, "c", 2, "b"),
    ],
)
def test_when_a_generation_ends(
    line: list[int],
    params: dict[str, Any],
    stop: str | None,
    reason: FinishReason,
    stop_reason: str | int | None,
    tokens: int,
    expected: str,
) -> None:
    engine = make_engine({"x": line})
    engine.add(make_request("x", stop=stop, **params))
    outputs = run(engine)["x"]
    last = outputs[-1]
    assert (last.finish_reason, last.stop_reason) == (reason, stop_reason)
    assert all(not output.finished for output in outputs[:-1])
    assert text(outputs) == expected
    assert last.usage is not None
    assert last.usage.completion_tokens == sum(len(output.token_ids) for output in outputs) == tokens
    assert last.usage.prompt_tokens == 3


def test_many_requests_share_steps_and_keep_their_own_ends() -> None:
    engine = make_engine({"a": [2] * 9, "b": [3, EOS]})
    engine.add(make_request("a"))
    engine.add(make_request("b"))
    outputs = run(engine)
    assert text(outputs["a"]) == "bbbbb"
    assert text(outputs["b"]) == "c"
    assert len(engine.runner.plans) == 5  # type: ignore[attr-defined]


def test_a_row_without_logits_fails_its_request_alone() -> None:
    engine = make_engine({"bad": [2, -1], "good": [3] * 9})
    engine.add(make_request("bad"))
    engine.add(make_request("good"))
    outputs = run(engine)
    error = outputs["bad"][-1].error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL
    assert text(outputs["good"]) == "ccccc"
    assert engine.stats().kv_usage == 0


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        (
            {"max_model_len": 10},
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            "params.max_tokens: 3 prompt tokens and up to 100 generated ones are 103;"
            " the model's context holds 10",
        ),
        (
            {"num_blocks": 2},
            ErrorCode.KV_CAPACITY_EXCEEDED,
            "params.max_tokens: 3 prompt tokens and up to 100 generated ones are 103; the KV cache holds 9",
        ),
    ],
)
def test_what_can_never_fit_is_refused_in_the_jobs_own_terms(
    config: dict[str, int], code: ErrorCode, message: str
) -> None:
    engine = make_engine(**config)
    engine.add(make_request("small"))
    with pytest.raises(InvalidJob) as refused:
        engine.add(make_request("large", max_tokens=100))
    assert str(refused.value) == message
    assert (refused.value.code, refused.value.field) == (code, "params.max_tokens")
    assert list(run(engine)) == ["small"]


def test_an_id_is_generated_once_at_a_time() -> None:
    engine = make_engine()
    engine.add(make_request("x"))
    with pytest.raises(InvalidJob, match="id: x is being generated already"):
        engine.add(make_request("x"))
    assert len(run(engine)["x"]) == 5
    engine.add(make_request("x"))
    assert len(run(engine)["x"]) == 5


def test_an_aborted_request_is_never_heard_of_again() -> None:
    engine = make_engine()
    engine.add(make_request("gone", max_tokens=40))
    engine.add(make_request("stays"))
    engine.step()
    engine.abort("gone")
    engine.abort("never was")
    assert list(run(engine)) == ["stays"]
    assert engine.stats().kv_usage == 0


def test_a_resumed_request_generates_only_the_rest() -> None:
    engine = make_engine({"x": [3] * 9})
    request = make_request("x")
    request.output_token_ids = [2, 2]
    engine.add(request)
    outputs = run(engine)["x"]
    assert text(outputs) == "ccc"
    assert outputs[-1].usage is not None
    assert (outputs[-1].usage.prompt_tokens, outputs[-1].usage.completion_tokens) == (3, 5)


def test_marks_are_in_order_and_counters_count() -> None:
    ticks = iter(range(1000))
    engine = make_engine({"x": [2, EOS]})
    engine.clock = lambda: float(next(ticks))
    engine.add(make_request("x"))
    marks = run(engine)["x"][-1].marks
    assert marks is not None
    assert marks.added < marks.scheduled < marks.first_token < marks.finished
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_running) == (3, 2, 0)


def test_nothing_to_do_runs_nothing() -> None:
    engine = make_engine()
    assert engine.step() == []
    assert engine.runner.plans == []  # type: ignore[attr-defined]
