"""Several generations of one prompt, and the prompt's own logprobs: who ends when, and what is freed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.scripted import EOS, make_engine, make_request, ranked, run, script, text, tokens
from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import FinishReason
from tidemill.params import SamplingParams
from tidemill_worker.engine import Engine
from tidemill_worker.request import Request

PROMPT = tuple(range(10, 20))


def is_empty(engine: Engine) -> bool:
    engine.check_integrity()
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)


def test_each_generation_ends_by_itself_and_the_request_with_the_last() -> None:
    engine = make_engine({"x": [2, 2, 2, EOS], "x#1": [3, EOS], "x#2": [1] * 9})
    engine.add(make_request("x", n=3))
    outputs = run(engine)["x"]
    endings = [(o.choice, o.finish_reason, o.finished) for o in outputs if o.finish_reason is not None]
    assert endings == [
        (1, FinishReason.STOP, False),
        (0, FinishReason.STOP, False),
        (2, FinishReason.LENGTH, True),
    ]
    assert [text(outputs, choice) for choice in range(3)] == ["bbb", "c", "aaaaa"]
    assert [len(tokens(outputs, choice)) for choice in range(3)] == [4, 2, 5]
    assert [output.marks is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert is_empty(engine)


def test_generations_that_end_together_end_the_request_once() -> None:
    engine = make_engine()
    engine.add(make_request("x", n=4))
    outputs = run(engine)["x"]
    assert [output.finished for output in outputs].count(True) == 1
    assert outputs[-1].finished


def test_the_prompt_is_computed_and_counted_once() -> None:
    engine = make_engine(enable_prefix_caching=False)
    engine.add(make_request("x", PROMPT, n=4, max_tokens=2))
    outputs = run(engine)["x"]
    assert [len(tokens(outputs, choice)) for choice in range(4)] == [2] * 4
    # The first computes the prompt and a token behind it; the others only its last token, and one more.
    assert sum(plan.num_tokens for plan in script(engine).plans) == len(PROMPT) + 1 + 3 * 2
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (len(PROMPT), 8)


def test_what_a_sibling_computed_was_not_cached() -> None:
    """Given a first generation that has more to catch up with than the second, which shares its prompt
    and gets the first token: nothing of the prompt was there before the request came."""
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(make_request("x", PROMPT, resumed=[2] * 20, n=2, max_tokens=30))
    outputs = run(engine)["x"]
    assert outputs[0].choice == 1
    assert outputs[-1].num_cached_tokens == 0


def test_requests_with_many_generations_and_with_one_share_steps() -> None:
    engine = make_engine({"x": [2] * 5, "x#1": [3] * 5, "y": [2, 3, EOS]})
    engine.add(make_request("x", n=2))
    engine.add(make_request("y"))
    outputs = run(engine)
    assert (text(outputs["x"]), text(outputs["x"], 1), text(outputs["y"])) == ("bbbbb", "ccccc", "bc")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_generation_without_logits_fails_its_request_and_frees_all_of_it(failing: int) -> None:
    name = f"bad#{failing}" if failing else "bad"
    engine = make_engine({name: [2, -1]})
    engine.add(make_request("bad", n=3, max_tokens=9))
    engine.add(make_request("good", n=2))
    outputs = run(engine)
    finished = [output for output in outputs["bad"] if output.finished]
    assert finished == outputs["bad"][-1:]
    [last] = finished
    assert (last.choice, last.finish_reason) == (failing, FinishReason.ERROR)
    assert last.error is not None
    assert last.error.code is ErrorCode.INTERNAL
    assert text(outputs["good"]) == text(outputs["good"], 1) == "aaaaa"
    assert is_empty(engine)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_frees_all_generations(steps: int) -> None:
    """None of them outlives it (vllm#16863)."""
    engine = make_engine({"gone#1": [EOS]})
    engine.add(make_request("gone", PROMPT, n=5, max_tokens=9))
    for _ in range(steps):
        engine.step()
    engine.abort("gone")
    assert not engine.has_unfinished
    assert is_empty(engine)
    script(engine).lines.clear()
    engine.add(make_request("gone", n=2))
    assert len(run(engine)["gone"]) == 10


def test_a_resumed_request_goes_on_with_the_generations_that_had_not_ended() -> None:
    """Given three of which the first had ended, then only the others are made, each from where it was."""
    engine = make_engine({"x#1": [2] * 9, "x#2": [3] * 9})
    request = make_request("x", n=3)
    request.choices = request.choices[1:]
    request.choices[0].output_token_ids = (1, 1)
    engine.add(request)
    outputs = run(engine)["x"]
    assert [text(outputs, choice) for choice in range(3)] == ["", "bbb", "ccccc"]
    assert [output.finished for output in outputs].count(True) == 1


def test_what_can_never_fit_leaves_none_of_its_generations_behind() -> None:
    engine = make_engine(num_blocks=2)
    with pytest.raises(InvalidJob, match="the KV cache holds"):
        engine.add(make_request("x", n=3, max_tokens=50))
    assert not engine.has_unfinished
    assert is_empty(engine)


def test_more_generations_than_places_or_memory_still_all_end() -> None:
    engine = make_engine({f"x#{i}": [i % 3 + 1] * 9 for i in range(1, 8)}, max_num_seqs=3, num_blocks=8)
    engine.add(make_request("x", PROMPT, n=8, max_tokens=9))
    outputs = run(engine)["x"]
    assert [text(outputs, i) for i in range(8)] == ["abc"[i % 3] * 9 for i in range(8)]
    assert engine.stats().num_preemptions > 0
    assert is_empty(engine)


@pytest.mark.parametrize(
    "config",
    [{}, {"max_num_batched_tokens": 3, "max_num_seqs": 3}, {"enable_prefix_caching": False}],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 3])
def test_prompt_logprobs_are_whole_however_the_prompt_is_cut(config: dict[str, Any], n: int) -> None:
    engine = make_engine(**config)
    engine.add(make_request("warm", PROMPT))
    run(engine)
    engine.add(make_request("x", PROMPT, n=n, prompt_logprobs=2))
    *others, last = run(engine)["x"]
    assert all(output.prompt_logprobs is None for output in others)
    assert last.prompt_logprobs == tuple(ranked(token, 2) for token in PROMPT[1:])


def test_prompt_logprobs_outlast_a_preemption() -> None:
    """Given a long prompt that is thrown out halfway, when it comes back, then nothing is missing."""
    prompt = tuple(range(10, 34))
    engine = make_engine({"urgent": [2] * 9}, num_blocks=9, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(make_request("x", prompt, prompt_logprobs=1))
    engine.step()
    engine.step()
    urgent = make_request("urgent", tuple(range(40, 56)), max_tokens=9)
    urgent.priority = 0
    engine.add(urgent)
    outputs = run(engine)
    assert engine.stats().num_preemptions > 0
    assert outputs["x"][-1].prompt_logprobs == tuple(ranked(token, 1) for token in prompt[1:])


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    engine = make_engine()
    engine.add(make_request("x", [7], prompt_logprobs=3))
    assert run(engine)["x"][-1].prompt_logprobs == ()


def test_nobody_reports_prompt_logprobs_unasked() -> None:
    engine = make_engine()
    engine.add(make_request("x", PROMPT))
    assert {output.prompt_logprobs for output in run(engine)["x"]} == {None}


def test_a_request_may_want_nothing_but_its_prompts_logprobs() -> None:
    """Its generations were finished by an attempt that did not live to record them."""
    engine = make_engine()
    wanted = make_request("x", PROMPT, prompt_logprobs=0, max_tokens=1)
    engine.add(Request("x", PROMPT, wanted.params, 0, choices=()))
    [output] = run(engine)["x"]
    assert (output.token_ids, output.text, output.finish_reason) == ((), "", None)
    assert output.finished
    assert output.prompt_logprobs == tuple(ranked(token, 0) for token in PROMPT[1:])
    assert is_empty(engine)


def test_a_prompt_that_cannot_be_scored_takes_no_generation_its_ending() -> None:
    """All of them had ended by themselves, and keep their reasons."""
    engine = make_engine({"x": [-1]})
    engine.add(Request("x", PROMPT, SamplingParams(prompt_logprobs=0), 0, choices=()))
    [output] = run(engine)["x"]
    assert output.error is not None
    assert (output.finished, output.finish_reason) == (True, None)
