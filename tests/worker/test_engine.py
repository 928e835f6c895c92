"""The engine over a scripted runner: when a generation ends, what it reports, and who pays for faults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.scripted import EOS, Spelling, make_engine, make_request, ranked, run, script, text, tokens
from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import FinishReason
from tidemill_scheduler import RestoreCosts


@pytest.mark.parametrize(
    ("line", "params", "stop", "reason", "stop_reason", "num_tokens", "expected"),
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
    num_tokens: int,
    expected: str,
) -> None:
    engine = make_engine({"x": line})
    engine.add(make_request("x", stop=stop, **params))
    outputs = run(engine)["x"]
    last = outputs[-1]
    assert (last.finish_reason, last.stop_reason) == (reason, stop_reason)
    assert all(not output.finished for output in outputs[:-1])
    assert text(outputs) == expected
    assert len(tokens(outputs)) == num_tokens


def test_many_requests_share_steps_and_keep_their_own_ends() -> None:
    engine = make_engine({"a": [2] * 9, "b": [3, EOS]})
    engine.add(make_request("a"))
    engine.add(make_request("b"))
    outputs = run(engine)
    assert text(outputs["a"]) == "bbbbb"
    assert text(outputs["b"]) == "c"
    assert len(script(engine).plans) == 5


def test_a_row_without_logits_fails_its_request_alone() -> None:
    engine = make_engine({"bad": [2, -1], "good": [3] * 9})
    engine.add(make_request("bad"))
    engine.add(make_request("good"))
    outputs = run(engine)
    last = outputs["bad"][-1]
    assert last.error is not None
    assert (last.error.code, last.finish_reason) == (ErrorCode.INTERNAL, FinishReason.ERROR)
    assert text(outputs["good"]) == "ccccc"
    assert engine.stats().kv_usage == 0


def test_a_grammar_that_has_failed_says_why_no_token_is_left() -> None:
    engine = make_engine({"x": [2, -1]})
    grammar = Spelling(2, 3)
    grammar.error = "too deep"
    engine.add(make_request("x", grammar=grammar))
    error = run(engine)["x"][-1].error
    assert error is not None
    assert (error.code, "too deep" in error.message) == (ErrorCode.INTERNAL, True)


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
    engine.add(make_request("x", resumed=[2, 2]))
    outputs = run(engine)["x"]
    assert text(outputs) == "ccc"
    assert (engine.stats().prompt_tokens, engine.stats().generation_tokens) == (3, 3)


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


def test_those_of_the_last_step_are_counted_though_they_ended_with_it() -> None:
    engine = make_engine()
    for name in "abc":
        engine.add(make_request(name, max_tokens=1))
    engine.step()
    assert (engine.stats().num_rows, engine.stats().num_running) == (3, 0)
    engine.step()
    assert engine.stats().num_rows == 0


def test_who_waits_for_its_sibling_does_not_lack_room() -> None:
    """Given a prompt taken in chunks, then its generations wait for it, and another request for tokens."""
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=4)
    engine.add(make_request("x", range(40, 60), n=3))
    engine.step()
    assert (engine.stats().num_waiting, engine.stats().num_without_room) == (2, 0)
    engine.add(make_request("y"))
    engine.step()
    assert (engine.stats().num_waiting, engine.stats().num_without_room) == (3, 1)


def test_the_scheduler_goes_by_the_costs_measured_last() -> None:
    engine = make_engine()
    engine.add(make_request("x"))
    for seconds in (0.25, 0.5):
        script(engine).costs = RestoreCosts(seconds_per_token=seconds, seconds_per_block=2.0)
        engine.step()
        assert engine.scheduler.costs == script(engine).costs


def test_nothing_to_do_runs_nothing() -> None:
    engine = make_engine()
    assert engine.step() == []
    assert script(engine).plans == []


def test_a_second_request_reports_what_the_prefix_cache_had() -> None:
    engine = make_engine()
    prompt = list(range(10))
    engine.add(make_request("first", prompt))
    assert run(engine)["first"][-1].num_cached_tokens == 0
    engine.add(make_request("second", prompt))
    assert run(engine)["second"][-1].num_cached_tokens == 8


def test_a_grammar_that_is_complete_ends_the_generation() -> None:
    """Nothing but the end of the text could follow, so it is not waited for."""
    engine = make_engine({"x": [2, 3, 2, EOS]})
    engine.add(make_request("x", grammar=Spelling(2, 3, 2)))
    outputs = run(engine)["x"]
    assert script(engine).masks == [[2], [3], [2]]
    assert (text(outputs), tokens(outputs)) == ("bcb", [2, 3, 2])
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize(
    ("line", "params", "stop", "reason", "stop_reason"),
    [
        ([2, 3], {"max_tokens": 2}, None, FinishReason.LENGTH, None),
        ([2, 3, 2], {"max_tokens": 3}, None, FinishReason.STOP, None),
        ([2, 3], {}, "c", FinishReason.STOP, "c"),
        ([2, 3], {"stop_token_ids": (3,)}, None, FinishReason.STOP, 3),
    ],
)
def test_a_grammar_may_be_cut_off_by_every_other_end(
    line: list[int],
    params: dict[str, Any],
    stop: str | None,
    reason: FinishReason,
    stop_reason: str | int | None,
) -> None:
    engine = make_engine({"x": line})
    engine.add(make_request("x", stop=stop, grammar=Spelling(2, 3, 2), **params))
    last = run(engine)["x"][-1]
    assert (last.finish_reason, last.stop_reason) == (reason, stop_reason)


def test_end_of_text_ends_a_grammar_though_it_is_to_be_ignored() -> None:
    """A grammar that allows nothing else would leave no token to draw."""
    engine = make_engine({"x": [2, EOS]})
    grammar = Spelling(2, EOS)
    engine.add(make_request("x", grammar=grammar, ignore_eos=True))
    last = run(engine)["x"][-1]
    assert (last.finish_reason, grammar.left) == (FinishReason.STOP, [EOS])


def test_each_token_brings_its_logprobs_if_they_were_asked_for() -> None:
    engine = make_engine({"x": [2, 3, EOS], "y": [2, 3, EOS]})
    engine.add(make_request("x", logprobs=2))
    engine.add(make_request("y"))
    outputs = run(engine)
    assert [output.logprobs for output in outputs["x"]] == [(ranked(token, 2),) for token in (2, 3, EOS)]
    assert [output.logprobs for output in outputs["y"]] == [(), (), ()]
