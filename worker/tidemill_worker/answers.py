"""Builds the one result of a job, however it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import Choice, ErrorInfo, FinishReason, Result, Status, Timings, TokenLogprobs, Usage
from tidemill_worker.engine import StepOutput
from tidemill_worker.generation import Marks, RankedToken
from tidemill_worker.held import HeldJob
from tidemill_worker.held_choice import HeldChoice
from tidemill_worker.token_logprobs import on_wire

CUT_SHORT: Mapping[Status, FinishReason] = {
    Status.CANCELLED: FinishReason.CANCELLED,
    Status.EXPIRED: FinishReason.EXPIRED,
    Status.FAILED: FinishReason.ERROR,
}
"""What a generation says that the end of its job cut short; one that had ended by itself keeps its reason."""


@dataclass(frozen=True)
class Answers:
    """Knows what every result of this worker says alike."""

    model: str
    worker: str

    def generated(self, held: HeldJob, output: StepOutput) -> Result:
        """The engine has finished: with all generations, at the deadline, or with an error on this job."""
        if output.expired:
            return self.expired(held, output.marks)
        return self._result(
            held,
            Status.SUCCEEDED if output.error is None else Status.FAILED,
            cached_tokens=output.num_cached_tokens,
            prompt_logprobs=_prompt_logprobs(held, output.prompt_logprobs),
            marks=output.marks,
            error=output.error,
        )

    def completed_before(self, held: HeldJob) -> Result:
        """An earlier attempt had generated everything but not recorded it."""
        return self._result(held, Status.SUCCEEDED)

    def refused(self, held: HeldJob, error: InvalidJob) -> Result:
        """The job is wrong, or wrong for this model."""
        return self._result(held, Status.FAILED, error=ErrorInfo.of(error))

    def broken(self, held: HeldJob, error: Exception) -> Result:
        """Preparing the job failed in a way nobody foresaw."""
        info = ErrorInfo(code=ErrorCode.INTERNAL, message=f"{type(error).__name__}: {error}")
        return self._result(held, Status.FAILED, error=info)

    def cancelled(self, held: HeldJob) -> Result:
        """Somebody cancelled the job; it keeps the text generated so far."""
        info = ErrorInfo(code=ErrorCode.CANCELLED, message="the job was cancelled while it ran")
        return self._result(held, Status.CANCELLED, error=info)

    def expired(self, held: HeldJob, marks: Marks | None = None) -> Result:
        """The deadline passed while the job waited or ran; it keeps the text generated so far."""
        limit = held.job.deadline if held.job else None
        message = "the deadline passed before the job finished"
        if limit is not None:
            message = f"deadline: {limit:g} s passed before the job finished"
        info = ErrorInfo(code=ErrorCode.DEADLINE_EXCEEDED, message=message, field="deadline", limit=limit)
        return self._result(held, Status.EXPIRED, marks=marks, error=info)

    def _result(
        self,
        held: HeldJob,
        status: Status,
        *,
        cached_tokens: int = 0,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None,
        marks: Marks | None = None,
        error: ErrorInfo | None = None,
    ) -> Result:
        first, *others = (_choice(held, choice, status) for choice in held.choices)
        return Result(
            id=held.id,
            status=status,
            model=self.model,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            stop_reason=first.stop_reason,
            logprobs=first.logprobs,
            prompt_logprobs=prompt_logprobs,
            alternatives=tuple(others),
            usage=_usage(held, (first, *others), cached_tokens),
            timings=_timings(held, marks),
            attempts=held.attempt,
            worker=self.worker,
            metadata=held.job.metadata if held.job else {},
            error=error,
        )


def _choice(held: HeldJob, choice: HeldChoice, status: Status) -> Choice:
    ending = choice.ending
    wants_logprobs = held.job is not None and held.job.params.logprobs is not None
    return Choice(
        index=choice.index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=CUT_SHORT.get(status) if ending is None else ending.finish_reason,
        stop_reason=None if ending is None else ending.stop_reason,
        logprobs=on_wire(choice.logprobs, held.token_text) if wants_logprobs else None,
    )


def _usage(held: HeldJob, choices: Iterable[Choice], cached_tokens: int) -> Usage:
    """The prompt counts once, and every generated token once, whichever attempt it is from."""
    return Usage(
        prompt_tokens=held.num_prompt_tokens,
        completion_tokens=sum(len(choice.token_ids) for choice in choices),
        cached_tokens=cached_tokens,
    )


def _prompt_logprobs(
    held: HeldJob, ranked: Iterable[RankedToken] | None
) -> tuple[TokenLogprobs | None, ...] | None:
    """The first token follows on nothing, and so has no probability."""
    return None if ranked is None else (None, *on_wire(ranked, held.token_text))


def _timings(held: HeldJob, marks: Marks | None) -> Timings:
    """Without the engine's marks, all that is known is whether it had begun the job, and when."""
    if marks is None:
        scheduled = None if held.request is None else held.request.scheduled
        return Timings(queued=held.queued, waiting=None if scheduled is None else scheduled - held.claimed)
    return Timings(
        queued=held.queued,
        waiting=marks.scheduled - held.claimed,
        prefill=marks.first_token - marks.scheduled,
        decode=marks.finished - marks.first_token,
    )
