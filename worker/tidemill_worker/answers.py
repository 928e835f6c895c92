"""Builds the one result of a job, however it ended."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import ErrorInfo, FinishReason, Result, Status, Timings, Usage
from tidemill_worker.engine import Ending, Marks, StepOutput
from tidemill_worker.held import HeldJob


@dataclass(frozen=True)
class Answers:
    """Knows what every result of this worker says alike."""

    model: str
    worker: str

    def generated(self, held: HeldJob, output: StepOutput) -> Result:
        """The engine has finished: with a generation, or with an error on this job alone."""
        status = Status.SUCCEEDED if output.error is None else Status.FAILED
        return self._result(
            held,
            status,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            usage=output.usage,
            timings=_timings(held, output.marks),
            error=output.error,
        )

    def completed_before(self, held: HeldJob, ending: Ending) -> Result:
        """An earlier attempt had generated everything but not recorded it."""
        return self._result(
            held,
            Status.SUCCEEDED,
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
        )

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

    def expired(self, held: HeldJob) -> Result:
        """The deadline passed while the job ran; it keeps the text generated so far."""
        limit = held.job.deadline if held.job else None
        message = "the deadline passed before the job finished"
        if limit is not None:
            message = f"deadline: {limit:g} s passed before the job finished"
        info = ErrorInfo(code=ErrorCode.DEADLINE_EXCEEDED, message=message, field="deadline", limit=limit)
        return self._result(held, Status.EXPIRED, error=info)

    def _result(
        self,
        held: HeldJob,
        status: Status,
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        usage: Usage | None = None,
        timings: Timings | None = None,
        error: ErrorInfo | None = None,
    ) -> Result:
        return Result(
            id=held.id,
            status=status,
            model=self.model,
            text=held.text,
            token_ids=tuple(held.token_ids),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            usage=usage or Usage(prompt_tokens=held.num_prompt_tokens, completion_tokens=len(held.token_ids)),
            timings=timings or Timings(queued=held.queued),
            attempts=held.attempt,
            worker=self.worker,
            metadata=held.job.metadata if held.job else {},
            error=error,
        )


def _timings(held: HeldJob, marks: Marks | None) -> Timings:
    if marks is None:
        return Timings(queued=held.queued)
    return Timings(
        queued=held.queued,
        waiting=marks.scheduled - held.claimed,
        prefill=marks.first_token - marks.scheduled,
        decode=marks.finished - marks.first_token,
    )
