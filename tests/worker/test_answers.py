"""The one result of a job: what of each generation is in it, and why each went no further."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.worker.factories import MARKS, MODEL, make_held, make_output, token_text
from tests.worker.scripted import Ranked, ranked
from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import ErrorInfo, FinishReason, Result, Status, Usage
from tidemill_worker.answers import Answers
from tidemill_worker.engine import DEADLINE_PASSED
from tidemill_worker.held import HeldJob
from tidemill_worker.request import Ending
from tidemill_worker.token_logprobs import on_wire

AnswerOf = Callable[[HeldJob], Result]

ANSWERS = Answers(model=MODEL, worker="w1")
LAST = make_output("job/1", marks=MARKS)
REFUSAL = InvalidJob("model: wrong", field="model", limit="m", code=ErrorCode.MODEL_MISMATCH)
LATE = replace(LAST, error=DEADLINE_PASSED)
BROKEN = replace(LAST, error=ErrorInfo(code=ErrorCode.INTERNAL, message="no token"))


def half_done() -> HeldJob:
    """Four generations: one stopped, one at its limit, one cut off in its middle, one not begun."""
    held = make_held(params={"n": 4}, num_prompt_tokens=9)
    held.take_in(make_output("job/1", 1, 2, text="ab", finish_reason=FinishReason.STOP, stop_reason="c"))
    held.take_in(make_output("job/1", 3, text="c", choice=1, finish_reason=FinishReason.LENGTH))
    held.take_in(make_output("job/1", 4, 5, 6, text="def", choice=2))
    return held


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (ANSWERS.cancelled, Status.CANCELLED, FinishReason.CANCELLED),
        (ANSWERS.expired, Status.EXPIRED, FinishReason.EXPIRED),
        (lambda held: ANSWERS.generated(held, LATE), Status.EXPIRED, FinishReason.EXPIRED),
        (lambda held: ANSWERS.refused(held, REFUSAL), Status.FAILED, FinishReason.ERROR),
        (lambda held: ANSWERS.broken(held, KeyError("x")), Status.FAILED, FinishReason.ERROR),
        (lambda held: ANSWERS.generated(held, BROKEN), Status.FAILED, FinishReason.ERROR),
    ],
    ids=["cancelled", "late", "late in the engine", "refused", "broken", "no token"],
)
def test_what_had_ended_keeps_its_reason_and_the_rest_says_what_cut_it_short(
    answer: AnswerOf, status: Status, reason: FinishReason
) -> None:
    result = answer(half_done())
    assert result.status is status
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in result.choices] == ["stop", "length", reason, reason]
    assert [choice.stop_reason for choice in result.choices] == ["c", None, None, None]
    assert [choice.text for choice in result.choices] == ["ab", "c", "def", ""]
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", (1, 2), "stop")
    assert result.usage == Usage(prompt_tokens=9, completion_tokens=6)
    assert result.error is not None
    assert Result.from_wire(result.to_wire()) == result


@pytest.mark.parametrize("n", [1, 3])
def test_a_refused_job_has_as_many_generations_as_it_asked_for(n: int) -> None:
    result = ANSWERS.refused(make_held(params={"n": n}), REFUSAL)
    assert [choice.finish_reason for choice in result.choices] == [FinishReason.ERROR] * n
    assert (result.error and result.error.field, result.usage.total_tokens) == ("model", 0)


def test_a_job_that_cannot_be_decoded_has_one() -> None:
    result = ANSWERS.refused(make_held(), REFUSAL)
    assert [choice.finish_reason for choice in result.choices] == [FinishReason.ERROR]


def test_a_generation_by_itself_has_no_alternatives() -> None:
    held = make_held(params={})
    held.take_in(make_output("job/1", 1, text="a", finish_reason=FinishReason.STOP, stop_reason=1))
    result = ANSWERS.generated(held, LAST)
    assert (result.finish_reason, result.stop_reason, result.alternatives) == (FinishReason.STOP, 1, ())
    assert (result.logprobs, result.prompt_logprobs) == (None, None)


def test_the_prompt_and_what_earlier_attempts_generated_count_once() -> None:
    """Given a resumed job, then its cost is that of an undisturbed one."""
    held = make_held(params={"n": 2}, num_prompt_tokens=9, attempt=2)
    held.resume(0, [1, 2, 3], "abc", ending=Ending(FinishReason.STOP, None))
    held.resume(1, [4, 5], "de")
    held.take_in(make_output("job/2", 6, text="f", choice=1, finish_reason=FinishReason.LENGTH))
    result = ANSWERS.generated(held, replace(LAST, num_cached_tokens=8))
    assert result.usage == Usage(prompt_tokens=9, completion_tokens=6, cached_tokens=8)
    assert [(choice.text, choice.finish_reason) for choice in result.choices] == [
        ("abc", FinishReason.STOP),
        ("def", FinishReason.LENGTH),
    ]


def test_what_an_earlier_attempt_completed_is_answered_from_its_checkpoint() -> None:
    held = make_held(params={"n": 2, "logprobs": 1}, num_prompt_tokens=9)
    said = on_wire([ranked(3, 1)], token_text)
    held.resume(0, [3], "abc", said, Ending(FinishReason.STOP, "d"))
    held.resume(1, [3], "de", said, Ending(FinishReason.LENGTH))
    result = ANSWERS.completed_before(held)
    assert result.status is Status.SUCCEEDED
    assert [(choice.text, choice.finish_reason, choice.stop_reason) for choice in result.choices] == [
        ("abc", FinishReason.STOP, "d"),
        ("de", FinishReason.LENGTH, None),
    ]
    assert [choice.logprobs for choice in result.choices] == [said, said]
    assert result.usage == Usage(prompt_tokens=9, completion_tokens=2)


def test_logprobs_are_there_for_every_token_of_every_generation() -> None:
    held = make_held(params={"n": 2, "logprobs": 2})
    held.take_in(make_output("job/1", 1, 2, num_top=2))
    held.take_in(make_output("job/1", 3, choice=1, num_top=2))
    result = ANSWERS.cancelled(held)
    assert [choice.logprobs for choice in result.choices] == [
        on_wire([ranked(1, 2), ranked(2, 2)], token_text),
        on_wire([ranked(3, 2)], token_text),
    ]


def test_asked_for_logprobs_of_no_token_are_none_of_them() -> None:
    assert ANSWERS.cancelled(make_held(params={"logprobs": 0})).logprobs == ()


def test_the_first_token_of_the_prompt_has_no_logprobs() -> None:
    held = make_held(params={"prompt_logprobs": 1})
    held.take_in(make_output("job/1", 1, finish_reason=FinishReason.STOP))
    entries = (Ranked(5, -1.0, 2, ((6, -0.5),)), Ranked(6, -0.25))
    result = ANSWERS.generated(held, replace(LAST, prompt_logprobs=entries))
    assert result.prompt_logprobs == (None, *on_wire(entries, token_text))
    assert ANSWERS.generated(held, replace(LAST, prompt_logprobs=())).prompt_logprobs == (None,)
