"""Turns what was claimed into a request for the engine, or into the answer that refuses it.

Runs off the engine thread and touches neither Redis nor the engine, so that a bad job costs the
good ones nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import structlog

from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import Delta, FinishReason, Job, Priority, Result, TokenLogprobs
from tidemill.moves import Claimed
from tidemill.params import SamplingParams
from tidemill_worker.answers import Answers
from tidemill_worker.grammar import GrammarCompiler
from tidemill_worker.held import HeldJob
from tidemill_worker.request import Ending, OpenChoice, Request, ending_after
from tidemill_worker.tokenizer import Tokenizer

MAX_LOGPROBS = 1 << 17
"""Of the prompt, and of all that is generated; each takes some 70 bytes of the result."""
COMPILED = (b'"structured_outputs"', b'"response_format"')
"""How a payload says that its grammar is to be compiled."""
PRIORITIES = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}
"""The engine's numbers: lower goes first."""


@dataclass(frozen=True)
class ModelLimits:
    """What the served model can take."""

    model_name: str
    max_model_len: int
    """Prompt plus output, in tokens: the model's context."""
    max_total_tokens: int
    """Tokens that the whole KV cache holds; no job can ever have more."""
    end_of_text: frozenset[int]

    @property
    def capacity(self) -> int:
        """Prompt plus output, in tokens, that a job can have here."""
        return min(self.max_model_len, self.max_total_tokens)


@dataclass(frozen=True)
class Admission:
    """Validates and tokenizes claimed jobs for one model."""

    tokenizer: Tokenizer
    grammars: GrammarCompiler
    limits: ModelLimits
    answers: Answers
    clock: Callable[[], float] = time.monotonic

    def hold(self, claimed: Claimed) -> HeldJob:
        """The claimed job as this process will track it, from the moment its reply has come."""
        now = self.clock()
        deadline = None
        if claimed.deadline_ms is not None:
            deadline = now + (claimed.deadline_ms - claimed.claimed_ms) / 1000
        return HeldJob(
            id=claimed.job_id,
            attempt=claimed.attempt,
            stream=claimed.stream,
            claimed=now,
            token_text=self.tokenizer.token_text,
            queued=(claimed.claimed_ms - claimed.submitted_ms) / 1000,
            deadline=deadline,
            aside=claimed.alone,
        )

    def takes_long(self, claimed: Claimed) -> bool:
        """Whether `prepare` may take a second: a grammar has to be compiled.

        Seen without decoding: as a key of the JSON, for within a string the quotes would be escaped.
        """
        return any(key in claimed.payload for key in COMPILED)

    def prepare(self, claimed: Claimed, held: HeldJob) -> Request | Result:
        """Decode, validate, tokenize and, if the job was begun before, replay what there is.

        Never raises: whatever is wrong with the job becomes its result.
        """
        try:
            return self._prepare(claimed, held)
        except InvalidJob as error:
            return self.answers.refused(held, error)
        except Exception as error:
            structlog.get_logger().exception("preparation_failed", job=held.id)
            return self.answers.broken(held, error)

    def _prepare(self, claimed: Claimed, held: HeldJob) -> Request | Result:
        job = held.job = Job.from_wire(claimed.payload)
        params = job.params
        if held.deadline is not None and held.deadline <= self.clock():
            return self._expired(claimed, held, params)
        self._check_model(job)
        self._check_vocabulary(params)
        prompt = self.tokenizer.prompt_token_ids(job, capacity=self.limits.capacity)
        held.num_prompt_tokens = len(prompt)
        self._check_length(job, len(prompt))
        _check_num_logprobs(params, len(prompt))
        self._check_checkpoint(params, claimed.checkpoint)
        bad_words = self.tokenizer.bad_words(params.bad_words)
        choices = self._open_choices(claimed, held, params, prompt)
        if not choices and params.prompt_logprobs is None:
            return self.answers.completed_before(held)
        held.request = Request(
            id=held.request_id,
            prompt_token_ids=prompt,
            params=params,
            seed=claimed.seed if params.seed is None else params.seed,
            choices=choices,
            bad_words=bad_words,
            priority=PRIORITIES[job.priority],
            salt=job.tenant.encode(),
            deadline=held.deadline,
        )
        return held.request

    def _expired(self, claimed: Claimed, held: HeldJob, params: SamplingParams) -> Result:
        """The answer to a job that came too late, with what earlier attempts have stored of it.

        That is taken as it is: to replay it would take tokenizing and compiling.
        """
        self._check_checkpoint(params, claimed.checkpoint)
        for index in range(params.n):
            deltas = _deltas_of(claimed, index)
            text = "".join(delta.text for delta in deltas)
            held.resume(index, _tokens(deltas), text, _logprobs(deltas), _stored_ending(deltas))
        return self.answers.expired(held)

    def _open_choices(
        self, claimed: Claimed, held: HeldJob, params: SamplingParams, prompt: Sequence[int]
    ) -> list[OpenChoice]:
        """The generations to be made, or gone on with; those that have ended are known to `held`."""
        outputs = params.structured_outputs
        grammar = None if outputs is None else self.grammars.compile(outputs)
        choices = []
        for index in range(params.n):
            output_text = self.tokenizer.output_text(params, prompt)
            choice = OpenChoice(index, output_text, None if grammar is None else grammar.start())
            if not self._replay(claimed, held, params, choice):
                choices.append(choice)
        return choices

    def _replay(
        self, claimed: Claimed, held: HeldJob, params: SamplingParams, choice: OpenChoice
    ) -> Ending | None:
        """Take up the checkpoint of an earlier attempt; return how the generation ended, if it had.

        The queue gives out no checkpoint of another build, so the end is where it was seen then.
        """
        deltas = _deltas_of(claimed, choice.index)
        token_ids = _tokens(deltas)
        ending = None
        for number, token in enumerate(token_ids, start=1):
            if ending is not None:
                raise _tampered(f"{len(token_ids)} tokens of a generation that ends after {number - 1}")
            ending = ending_after(token, number, params, self.limits.end_of_text, choice)
        text = choice.output_text.take() if ending is None else choice.output_text.close()
        held.resume(choice.index, token_ids, text, _logprobs(deltas), ending)
        choice.output_token_ids = tuple(token_ids)
        return ending

    def _check_model(self, job: Job) -> None:
        served = self.limits.model_name
        if job.model is not None and job.model != served:
            raise InvalidJob(
                f"model: this queue serves {served}, not {job.model}",
                field="model",
                limit=served,
                code=ErrorCode.MODEL_MISMATCH,
            )

    def _check_vocabulary(self, params: SamplingParams) -> None:
        size = self.tokenizer.vocab_size
        named = [(f"stop_token_ids.{place}", token) for place, token in enumerate(params.stop_token_ids)]
        named += [(f"logit_bias.{token}", token) for token in params.logit_bias]
        for name, token in named:
            if token >= size:
                field = f"params.{name}"
                raise InvalidJob(
                    f"{field}: {token} is not in the vocabulary of {size} tokens", field=field, limit=size
                )

    def _check_checkpoint(self, params: SamplingParams, checkpoint: Sequence[Delta]) -> None:
        """Refuse tokens that no attempt at this job can have drawn."""
        size = self.tokenizer.vocab_size
        for delta in checkpoint:
            num_tokens, num_logprobs = len(delta.token_ids), len(delta.logprobs)
            fault = None
            if delta.choice >= params.n:
                fault = f"a generation {delta.choice}, asked for were {params.n}"
            elif max(delta.token_ids, default=0) >= size:
                fault = f"token {max(delta.token_ids)} is not in the vocabulary of {size} tokens"
            elif params.logprobs is not None and num_logprobs != num_tokens:
                fault = f"{num_logprobs} logprobs of {num_tokens} tokens"
            if fault is not None:
                raise _tampered(fault)

    def _check_length(self, job: Job, num_prompt_tokens: int) -> None:
        self._check_room(
            job,
            num_prompt_tokens,
            self.limits.max_model_len,
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            "the model's context",
        )
        self._check_room(
            job,
            num_prompt_tokens,
            self.limits.max_total_tokens,
            ErrorCode.KV_CAPACITY_EXCEEDED,
            "this worker's KV cache",
        )

    def _check_room(
        self, job: Job, num_prompt_tokens: int, capacity: int, code: ErrorCode, what: str
    ) -> None:
        room = capacity - num_prompt_tokens
        if room < 1:
            field = _input_field(job)
            raise InvalidJob(
                f"{field}: {num_prompt_tokens} tokens leave no room for output in {what}"
                f" of {capacity} tokens",
                field=field,
                limit=capacity - 1,
                code=code,
            )
        if job.params.max_tokens > room:
            raise InvalidJob(
                f"params.max_tokens: {job.params.max_tokens} after a prompt of {num_prompt_tokens}"
                f" tokens exceeds {what} of {capacity} tokens; at most {room} fit",
                field="params.max_tokens",
                limit=room,
                code=code,
            )


def _tampered(fault: str) -> InvalidJob:
    """Someone else has written to the checkpoint."""
    return InvalidJob(f"checkpoint: {fault}", code=ErrorCode.UNDECODABLE)


def _deltas_of(claimed: Claimed, choice: int) -> list[Delta]:
    return [delta for delta in claimed.checkpoint if delta.choice == choice]


def _tokens(deltas: Sequence[Delta]) -> list[int]:
    return list(chain.from_iterable(delta.token_ids for delta in deltas))


def _logprobs(deltas: Sequence[Delta]) -> list[TokenLogprobs]:
    return list(chain.from_iterable(delta.logprobs for delta in deltas))


def _stored_ending(deltas: Sequence[Delta]) -> Ending | None:
    """How a generation ended by itself, if its last delta says so."""
    if not deltas or deltas[-1].finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return None
    return Ending(deltas[-1].finish_reason, deltas[-1].stop_reason)


def _check_num_logprobs(params: SamplingParams, num_prompt_tokens: int) -> None:
    asked = {
        "logprobs": (params.logprobs, params.n * params.max_tokens),
        "prompt_logprobs": (params.prompt_logprobs, num_prompt_tokens),
    }
    for name, (num_likeliest, num_tokens) in asked.items():
        if num_likeliest is None or num_tokens * (num_likeliest + 1) <= MAX_LOGPROBS:
            continue
        raise InvalidJob(
            f"params.{name}: each of {num_tokens} tokens with {num_likeliest} others are more than the"
            f" {MAX_LOGPROBS} entries that a result can hold",
            field=f"params.{name}",
            limit=MAX_LOGPROBS,
        )


def _input_field(job: Job) -> str:
    fields = ("prompt", "messages", "prompt_token_ids")
    return next(field for field in fields if getattr(job, field) is not None)
