"""What a claimed job becomes: a request, or an answer that names the field and the limit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.factories import (
    MODEL,
    make_admission,
    make_claim,
    make_delta,
    make_job,
    make_limits,
    make_tokenizer,
    token_text,
)
from tests.worker.scripted import ranked
from tidemill.errors import ErrorCode
from tidemill.jobs import Delta, ErrorInfo, FinishReason, Job, Result, Status
from tidemill.moves import Claimed
from tidemill_worker import admission as admission_module
from tidemill_worker.admission import Admission
from tidemill_worker.request import Ending, Request
from tidemill_worker.token_logprobs import on_wire


def prepare(claim: Claimed, admission: Admission | None = None) -> Request | Result:
    admission = admission or make_admission()
    return admission.prepare(claim, admission.hold(claim))


def refusal(job: Job | bytes, **limits: Any) -> ErrorInfo:
    result = prepare(make_claim(job), make_admission(limits=make_limits(**limits)))
    assert isinstance(result, Result)
    assert result.status is Status.FAILED
    assert result.error is not None
    return result.error


def prompt_tokens(job: Job) -> int:
    return len(make_tokenizer().prompt_token_ids(job))


def test_a_good_job_becomes_a_request() -> None:
    job = make_job("The tide", priority="high", tenant="acme", params={"stop": ["\n"]})
    request = prepare(make_claim(job, seed=99))
    assert isinstance(request, Request)
    assert request.id == f"{job.id}/1"
    assert request.prompt_token_ids == make_tokenizer().prompt_token_ids(job)
    assert (request.params, request.seed) == (job.params, 99)
    assert (request.priority, request.salt) == (0, b"acme")
    assert [(choice.index, choice.output_token_ids) for choice in request.choices] == [(0, ())]


def test_priorities_keep_their_order() -> None:
    requests = [prepare(make_claim(make_job(priority=name))) for name in ("high", "normal", "low")]
    numbers = [request.priority for request in requests if isinstance(request, Request)]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 3


def test_a_seed_of_the_job_counts_before_the_drawn_one() -> None:
    request = prepare(make_claim(make_job(params={"seed": 0}), seed=99))
    assert isinstance(request, Request)
    assert request.seed == 0


@pytest.mark.parametrize("payload", [b"\xff\xfe", b"[]", b"{}", b'{"prompt": "x", "surprise": 1}', b"{"])
def test_what_is_not_a_job_is_answered(payload: bytes) -> None:
    assert refusal(payload).code is ErrorCode.UNDECODABLE


def test_another_model_is_named() -> None:
    error = refusal(make_job(model="other"))
    assert (error.code, error.field, error.limit) == (ErrorCode.MODEL_MISMATCH, "model", MODEL)


def test_the_served_model_by_name_is_fine() -> None:
    assert isinstance(prepare(make_claim(make_job(model=MODEL))), Request)


def test_max_tokens_past_the_context_name_what_fits() -> None:
    job = make_job("The tide", params={"max_tokens": 64})
    error = refusal(job, max_model_len=64)
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert (error.field, error.limit) == ("params.max_tokens", 64 - prompt_tokens(job))
    assert isinstance(error.limit, int)
    fitting = make_job("The tide", params={"max_tokens": error.limit})
    assert isinstance(prepare(make_claim(fitting)), Request)


def test_a_prompt_that_fills_the_context_is_refused_as_such() -> None:
    job = make_job("mill " * 200, params={"max_tokens": 1})
    error = refusal(job, max_model_len=64)
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert (error.field, error.limit) == ("prompt", 63)
    assert str(prompt_tokens(job)) in error.message


def test_what_fits_the_context_but_never_the_cache_is_refused() -> None:
    """Otherwise it would wait forever, and all behind it (vllm#39734)."""
    job = make_job("The tide", params={"max_tokens": 40})
    error = refusal(job, max_model_len=64, max_total_tokens=33)
    assert error.code is ErrorCode.KV_CAPACITY_EXCEEDED
    assert (error.field, error.limit) == ("params.max_tokens", 33 - prompt_tokens(job))


def test_token_ids_outside_the_vocabulary_are_named() -> None:
    error = refusal(make_job(None, prompt_token_ids=[1, 100_000]))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "prompt_token_ids.1")
    error = refusal(make_job(params={"stop_token_ids": [3, 100_000]}))
    assert error.field == "params.stop_token_ids.1"
    assert error.limit == make_tokenizer().vocab_size


def test_an_unforeseen_fault_is_the_answer_of_this_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = make_admission()
    monkeypatch.setattr(admission.tokenizer, "prompt_token_ids", lambda *_, **__: 1 / 0)
    result = prepare(make_claim(), admission)
    assert isinstance(result, Result)
    assert result.error is not None
    assert result.error.code is ErrorCode.INTERNAL
    assert "ZeroDivisionError" in result.error.message


def test_an_answer_carries_metadata_and_times() -> None:
    job = make_job(model="other", metadata={"row": "3"})
    result = prepare(make_claim(job, attempt=2))
    assert isinstance(result, Result)
    assert (result.id, result.metadata, result.attempts, result.worker) == (job.id, {"row": "3"}, 2, "w1")
    assert result.timings.queued == 2.5


def test_a_deadline_counts_from_the_claim() -> None:
    admission = make_admission(clock=lambda: 100.0)
    held = admission.hold(make_claim(make_job(deadline=4.0), claimed_ms=3_500, deadline_ms=5_000))
    assert held.deadline == 101.5
    assert admission.hold(make_claim()).deadline is None


def test_a_request_has_the_deadline_of_its_job() -> None:
    admission = make_admission(clock=lambda: 100.0)
    request = prepare(make_claim(claimed_ms=3_500, deadline_ms=5_000), admission)
    assert isinstance(request, Request)
    assert request.deadline == 101.5


def test_a_job_that_is_late_is_answered_at_once_with_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is its prompt tokenized, nor a grammar compiled."""
    now = 100.0
    admission = make_admission(clock=lambda: now)
    monkeypatch.setattr(admission.tokenizer, "prompt_token_ids", lambda *_, **__: 1 / 0)
    ended = {"finish_reason": FinishReason.STOP, "stop_reason": "x"}
    deltas = (
        Delta(index=0, choice=1, token_ids=(word("A"), word("B")), text="AB"),
        Delta(index=2, choice=0, token_ids=(word("C"),), text="C", **ended),
        Delta(index=3, choice=1, token_ids=(word("ð"),), text=""),
    )
    params = {"n": 3, "temperature": 1.0, "structured_outputs": {"regex": "["}}
    claim = make_claim(make_job(deadline=4.0, params=params), deadline_ms=5_000, checkpoint=deltas)
    held = admission.hold(claim)
    now = 101.5
    result = admission.prepare(claim, held)
    assert isinstance(result, Result)
    assert result.status is Status.EXPIRED
    assert result.error is not None
    assert (result.error.code, result.error.field) == (ErrorCode.DEADLINE_EXCEEDED, "deadline")
    assert result.error.message == "deadline: 4 s passed before the job finished"
    assert [choice.text for choice in result.choices] == ["C", "AB", ""]
    assert [choice.finish_reason for choice in result.choices] == ["stop", "expired", "expired"]
    assert [len(choice.token_ids) for choice in result.choices] == [1, 3, 0]
    assert result.usage.completion_tokens == 4


def test_a_late_job_with_a_checkpoint_that_cannot_be_its_own_is_told() -> None:
    admission = make_admission(clock=lambda: 100.0)
    claim = make_claim(deadline_ms=3_500, checkpoint=(Delta(index=0, choice=2, token_ids=(60,), text="A"),))
    result = prepare(claim, admission)
    assert isinstance(result, Result)
    assert result.error is not None
    assert result.error.message.startswith("checkpoint: a generation 2")


def word(text: str) -> int:
    token_id: int = make_tokenizer()._backend.token_to_id(text)
    return token_id


def test_a_resumed_job_replays_its_checkpoint() -> None:
    """The half character at its end is not shown yet, and comes whole with the next token."""
    admission = make_admission()
    tokens = [word(token) for token in ("A", "ð", "Ł")]
    deltas = (make_delta(0, *tokens[:2], text="A"), make_delta(2, tokens[2]))
    claim = make_claim(make_job(), checkpoint=deltas)
    held = admission.hold(claim)
    request = admission.prepare(claim, held)
    assert isinstance(request, Request)
    (choice,) = request.choices
    assert list(choice.output_token_ids) == tokens == held.choice(0).token_ids
    assert (held.choice(0).text, held.has_news) == ("A", False)
    assert [choice.output_text.append(word(token)) for token in ("Į", "Ĭ")] == [None, None]
    assert choice.output_text.take() == "🌊"


@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        ({"max_tokens": 3}, ["A", "B", "C"], ("ABC", FinishReason.LENGTH, None)),
        ({"stop": ["BC"]}, ["A", "B", "C"], ("A", FinishReason.STOP, "BC")),
        ({}, ["A", "<eos>"], ("A", FinishReason.STOP, None)),
        ({"stop_token_ids": [word("B")]}, ["A", "B"], ("A", FinishReason.STOP, word("B"))),
    ],
)
def test_a_generation_that_was_complete_is_answered_without_a_step(
    params: dict[str, Any], tokens: list[str], expected: tuple[str, FinishReason, object]
) -> None:
    """The worker before died between the last checkpoint and the result."""
    ids = [word(token) for token in tokens]
    result = prepare(make_claim(make_job(params=params), checkpoint=(make_delta(0, *ids),)))
    assert isinstance(result, Result)
    assert result.status is Status.SUCCEEDED
    assert (result.text, result.finish_reason, result.stop_reason) == expected
    assert result.usage.completion_tokens == len(result.token_ids)


def test_end_of_text_may_be_ignored() -> None:
    claim = make_claim(make_job(params={"ignore_eos": True}), checkpoint=(make_delta(0, word("<eos>")),))
    assert isinstance(prepare(claim), Request)


def test_every_generation_is_a_choice_of_its_own() -> None:
    request = prepare(make_claim(make_job(params={"n": 3, "temperature": 1.0, "bad_words": ["mill"]})))
    assert isinstance(request, Request)
    assert [choice.index for choice in request.choices] == [0, 1, 2]
    assert len({id(choice.output_text) for choice in request.choices}) == 3
    assert request.bad_words == make_tokenizer().bad_words(["mill"])


def test_each_choice_goes_on_from_its_own_checkpoint() -> None:
    """The second had ended; it is not made again."""
    admission = make_admission()
    a, b, eos = word("A"), word("B"), word("<eos>")
    deltas = (
        Delta(index=0, choice=0, token_ids=(a,), text="A"),
        Delta(index=1, choice=1, token_ids=(b, eos), text="B"),
        Delta(index=3, choice=0, token_ids=(b,), text="B"),
    )
    claim = make_claim(make_job(params={"n": 3, "temperature": 1.0}), checkpoint=deltas)
    held = admission.hold(claim)
    request = admission.prepare(claim, held)
    assert isinstance(request, Request)
    assert [(choice.index, choice.output_token_ids) for choice in request.choices] == [(0, (a, b)), (2, ())]
    assert held.choice(1).ending == Ending(FinishReason.STOP)
    assert [choice.text for choice in held.choices] == ["AB", "B", ""]


def test_a_generation_that_was_cut_short_goes_on() -> None:
    deltas = (Delta(index=0, token_ids=(word("A"),), text="A", finish_reason=FinishReason.ERROR),)
    assert isinstance(prepare(make_claim(make_job(), checkpoint=deltas)), Request)


def test_a_checkpoint_beyond_its_end_is_told() -> None:
    """It is of this worker's build, or the queue would have dropped it: somebody has written to it."""
    deltas = (make_delta(0, word("A"), word("<eos>"), word("B"), text="AB"),)
    result = prepare(make_claim(make_job(), checkpoint=deltas))
    assert isinstance(result, Result)
    assert result.error is not None
    assert result.error.code is ErrorCode.UNDECODABLE
    assert result.error.message == "checkpoint: 3 tokens of a generation that ends after 2"


def test_a_suspect_is_held_aside() -> None:
    admission = make_admission()
    assert admission.hold(make_claim(alone=True)).aside
    assert not admission.hold(make_claim()).aside


@pytest.mark.parametrize(
    ("delta", "fault"),
    [
        ({"choice": 2}, "a generation 2, asked for were 2"),
        ({"token_ids": (60, 100_000)}, "token 100000"),
        ({"token_ids": (60, 61)}, "1 logprobs of 2 tokens"),
        ({"logprobs": ()}, "0 logprobs of 1 tokens"),
    ],
)
def test_a_checkpoint_that_cannot_be_of_this_job_is_told(delta: dict[str, Any], fault: str) -> None:
    job = make_job(params={"n": 2, "temperature": 1.0, "logprobs": 0})
    whole = {"index": 0, "token_ids": (60,), "logprobs": on_wire([ranked(60, 0)], token_text)}
    result = prepare(make_claim(job, checkpoint=(Delta(**(whole | delta)),)))
    assert isinstance(result, Result)
    assert result.error is not None
    assert (result.error.code, result.error.field) == (ErrorCode.UNDECODABLE, None)
    assert result.error.message.startswith(f"checkpoint: {fault}")


def test_prompt_logprobs_are_computed_even_if_the_generation_was_complete() -> None:
    params = {"max_tokens": 1, "prompt_logprobs": 0}
    claim = make_claim(make_job(params=params), checkpoint=(make_delta(0, word("A")),))
    request = prepare(claim)
    assert isinstance(request, Request)
    assert request.choices == []


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"n": 64, "max_tokens": 40, "temperature": 1.0, "logprobs": 20}, "params.logprobs"),
        ({"prompt_logprobs": 20}, "params.prompt_logprobs"),
    ],
)
def test_more_logprobs_than_a_result_can_hold_are_refused(
    params: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "MAX_LOGPROBS", 40)
    error = refusal(make_job(params=params))
    assert (error.code, error.field, error.limit) == (ErrorCode.INVALID_REQUEST, field, 40)


def test_a_bias_outside_the_vocabulary_is_named() -> None:
    error = refusal(make_job(params={"logit_bias": {100_000: 1.0}}))
    assert (error.field, error.limit) == ("params.logit_bias.100000", make_tokenizer().vocab_size)


def test_a_grammar_stands_where_the_checkpoint_ends() -> None:
    job = make_job(params={"structured_outputs": {"choice": ["AB", "AC"]}})
    request = prepare(make_claim(job, checkpoint=(make_delta(0, word("A"), text="A"),)))
    assert isinstance(request, Request)
    grammar = request.choices[0].grammar
    assert grammar is not None
    allowed = grammar.allowed_tokens()
    tokens = [token for token in range(32 * len(allowed)) if allowed[token // 32] >> (token % 32) & 1]
    assert tokens == sorted([word("B"), word("C")])


def test_what_cannot_be_compiled_is_refused_by_field() -> None:
    error = refusal(make_job(params={"structured_outputs": {"regex": "(["}}))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "params.structured_outputs.regex")
