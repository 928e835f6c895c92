"""Turns what was claimed into a request for the engine, or into the answer that refuses it.

Runs off the engine thread and touches neither Redis nor the engine, so that a bad job costs the
good ones nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import Job, Priority, Result, SamplingParams
from tidemill.moves import Claimed
from tidemill_worker.answers import Answers
from tidemill_worker.engine import Ending, OutputText, Request, ending_after
from tidemill_worker.held import HeldJob
from tidemill_worker.tokenizer import Tokenizer

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


@dataclass(frozen=True)
class Admission:
    """Validates and tokenizes claimed jobs for one model."""

    tokenizer: Tokenizer
    limits: ModelLimits
    answers: Answers
    clock: Callable[[], float] = time.monotonic

    def hold(self, claimed: Claimed) -> HeldJob:
        """The claimed job as this process will track it."""
        now = self.clock()
        deadline = None
        if claimed.deadline_ms is not None:
            deadline = now + (claimed.deadline_ms - claimed.claimed_ms) / 1000
        return HeldJob(
            id=claimed.job_id,
            attempt=claimed.attempt,
            stream=claimed.stream,
            claimed=now,
            queued=(claimed.claimed_ms - claimed.submitted_ms) / 1000,
            deadline=deadline,
        )

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
        self._check_model(job)
        self._check_stop_tokens(job.params)
        prompt = self.tokenizer.prompt_token_ids(job)
        held.num_prompt_tokens = len(prompt)
        self._check_length(job, len(prompt))
        output_text = self.tokenizer.output_text(job.params.stop)
        ending = self._replay(claimed, held, job.params, output_text)
        if ending is not None:
            return self.answers.completed_before(held, ending)
        return Request(
            id=held.request_id,
            prompt_token_ids=prompt,
            params=job.params,
            seed=claimed.seed if job.params.seed is None else job.params.seed,
            output_text=output_text,
            output_token_ids=tuple(held.token_ids),
            priority=PRIORITIES[job.priority],
            salt=job.tenant.encode(),
        )

    def _check_model(self, job: Job) -> None:
        served = self.limits.model_name
        if job.model is not None and job.model != served:
            raise InvalidJob(
                f"model: this queue serves {served}, not {job.model}",
                field="model",
                limit=served,
                code=ErrorCode.MODEL_MISMATCH,
            )

    def _check_stop_tokens(self, params: SamplingParams) -> None:
        size = self.tokenizer.vocab_size
        for position, token_id in enumerate(params.stop_token_ids):
            if token_id >= size:
                field = f"params.stop_token_ids.{position}"
                raise InvalidJob(
                    f"{field}: {token_id} is not in the vocabulary of {size} tokens",
                    field=field,
                    limit=size,
                )

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

    def _replay(
        self, claimed: Claimed, held: HeldJob, params: SamplingParams, output_text: OutputText
    ) -> Ending | None:
        """Take up the checkpoint of an earlier attempt; return how it ended, if it had."""
        token_ids: list[int] = []
        ending = None
        for token in (token for delta in claimed.checkpoint for token in delta.token_ids):
            token_ids.append(token)
            ending = ending_after(token, len(token_ids), params, self.limits.end_of_text, output_text)
            if ending is not None:
                break
        held.resume(token_ids, output_text.take() if ending is None else output_text.close())
        return ending


def _input_field(job: Job) -> str:
    fields = ("prompt", "messages", "prompt_token_ids")
    return next(field for field in fields if getattr(job, field) is not None)
