"""The engine: continuous batching, one step at a time.

`Engine.step` is the whole product in four lines: schedule, run, update, answer. It owns no clock,
no thread, no socket and no tensor; the service calls it in a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import ErrorInfo, FinishReason, SamplingParams, Usage
from tidemill_scheduler import NeverFits, Scheduler, SequenceId, StepPlan
from tidemill_scheduler import Sequence as ScheduledSequence


class OutputText(Protocol):
    """Turns generated tokens into text, holding back what may still change."""

    def append(self, token_id: int) -> str | None:
        """Take one generated token; return the stop string it completed, if any."""

    def take(self) -> str:
        """Text not handed out yet that can no longer change."""

    def close(self) -> str:
        """Everything left, at the end of the generation."""


@dataclass(frozen=True)
class Ending:
    """Why a generation is complete; `stop_reason` is the stop string or token, if it was one."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None


def ending_after(
    token: int,
    num_output_tokens: int,
    params: SamplingParams,
    end_of_text: frozenset[int],
    output_text: OutputText,
) -> Ending | None:
    """Take in one generated token, the `num_output_tokens`-th; say whether it is the last, and why.

    Tokens that end the generation by themselves leave no text; all others go to `output_text`.
    """
    if token in params.stop_token_ids:
        return Ending(FinishReason.STOP, token)
    if token in end_of_text and not params.ignore_eos:
        return Ending(FinishReason.STOP)
    stop_string = output_text.append(token)
    if stop_string is not None:
        return Ending(FinishReason.STOP, stop_string)
    if num_output_tokens >= params.max_tokens:
        return Ending(FinishReason.LENGTH)
    return None


@dataclass
class Request:
    """One generation the engine has been asked for.

    A request that resumes an earlier attempt brings the tokens generated so far in
    `output_token_ids`, already replayed through `output_text`.
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    output_text: OutputText
    output_token_ids: Sequence[int] = ()
    priority: int = 1
    salt: bytes = b""


class Runner(Protocol):
    """Executes a plan on the model; see `tidemill_worker.model.runner`."""

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> Mapping[SequenceId, int]:
        """Return the next token of each sequence whose row samples, negative if it has none."""


@dataclass(frozen=True)
class Marks:
    """When a request reached each stage, in seconds of the engine's clock."""

    added: float
    scheduled: float
    first_token: float
    finished: float


@dataclass(frozen=True)
class StepOutput:
    """What one step brought one request."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: ErrorInfo | None = None
    usage: Usage | None = None
    """Set, like `marks`, when this output is the request's last."""
    marks: Marks | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True)
class EngineStats:
    """A look at the engine between two steps; what counts, counts from its start."""

    num_running: int
    num_waiting: int
    kv_usage: float
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    recomputed_tokens: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    """Steps that computed something."""


@dataclass
class Generation:
    """A request on its way through the engine."""

    request: Request
    sequence: ScheduledSequence
    added: float
    scheduled: float | None = None
    first_token: float | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        return self.sequence.token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequence.num_prompt_tokens

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def num_output_tokens(self) -> int:
        return len(self.sequence.token_ids) - self.sequence.num_prompt_tokens


@dataclass
class Engine:
    """Owns the scheduler and the generations in flight; one thread at a time may use it."""

    runner: Runner
    scheduler: Scheduler
    end_of_text: frozenset[int]
    clock: Callable[[], float] = time.monotonic
    _generations: dict[SequenceId, Generation] = field(default_factory=dict)
    _sequences: dict[str, SequenceId] = field(default_factory=dict)
    _num_added: int = 0
    _prompt_tokens: int = 0
    _generation_tokens: int = 0
    _num_steps: int = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._generations)

    def add(self, request: Request) -> None:
        """Take a request into the next steps.

        Raises:
            InvalidJob: if this id is in the engine already, or if the request could not be finished
                even with the whole KV cache to itself.
        """
        if request.id in self._sequences:
            raise InvalidJob(f"id: {request.id} is being generated already", field="id")
        sequence = ScheduledSequence(
            id=SequenceId(self._num_added),
            token_ids=[*request.prompt_token_ids, *request.output_token_ids],
            num_prompt_tokens=len(request.prompt_token_ids),
            priority=request.priority,
            salt=request.salt,
            max_total_tokens=len(request.prompt_token_ids) + request.params.max_tokens,
        )
        try:
            self.scheduler.add(sequence)
        except NeverFits as error:
            raise _never_fits(request, error) from error
        self._num_added += 1
        self._sequences[request.id] = sequence.id
        self._generations[sequence.id] = Generation(request, sequence, added=self.clock())

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds; unknown ones are none of our business."""
        sequence_id = self._sequences.pop(request_id, None)
        if sequence_id is not None:
            del self._generations[sequence_id]
            self.scheduler.finish(sequence_id)

    def step(self) -> list[StepOutput]:
        """Run one step; return what it brought to each request that got a token."""
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return []
        self._mark_scheduled(plan)
        sampled = self.runner.run(plan, self._generations)
        self.scheduler.update(plan.step_id, sampled)
        self._num_steps += 1
        return [self._advance(self._generations[sequence], token) for sequence, token in sampled.items()]

    def check_integrity(self) -> None:
        """Compare the scheduler's books with each other; for idle moments.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        self.scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """Gauges and counters for the metrics endpoint."""
        scheduler = self.scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=scheduler.kv_usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_query_tokens=scheduler.num_prefix_query_tokens,
            prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
            recomputed_tokens=scheduler.num_recomputed_tokens,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_steps=self._num_steps,
        )

    def _mark_scheduled(self, plan: StepPlan) -> None:
        for row in plan.rows:
            generation = self._generations[row.sequence]
            if generation.scheduled is None:
                generation.scheduled = self.clock()

    def _advance(self, generation: Generation, token: int) -> StepOutput:
        """Account for one sampled token and decide whether it is the last."""
        if token < 0:
            return self._fail(generation)
        if generation.first_token is None:
            generation.first_token = self.clock()
            self._prompt_tokens += generation.num_prompt_tokens
        self._generation_tokens += 1
        ending = ending_after(
            token,
            generation.num_output_tokens,
            generation.params,
            self.end_of_text,
            generation.request.output_text,
        )
        text = generation.request.output_text.take()
        if ending is None:
            return StepOutput(generation.request.id, (token,), text)
        return self._finish(generation, token, text, ending)

    def _finish(self, generation: Generation, token: int, text: str, ending: Ending) -> StepOutput:
        output = StepOutput(
            generation.request.id,
            (token,),
            text + generation.request.output_text.close(),
            ending.finish_reason,
            ending.stop_reason,
            usage=Usage(
                prompt_tokens=generation.num_prompt_tokens,
                completion_tokens=generation.num_output_tokens,
                cached_tokens=generation.sequence.num_cached_tokens,
            ),
            marks=self._marks(generation),
        )
        self.abort(generation.request.id)
        return output

    def _fail(self, generation: Generation) -> StepOutput:
        error = ErrorInfo(
            code=ErrorCode.INTERNAL,
            message="the model's logits for this job are not finite numbers",
        )
        output = StepOutput(generation.request.id, (), "", error=error, marks=self._marks(generation))
        self.abort(generation.request.id)
        return output

    def _marks(self, generation: Generation) -> Marks:
        now = self.clock()
        return Marks(
            added=generation.added,
            scheduled=now if generation.scheduled is None else generation.scheduled,
            first_token=now if generation.first_token is None else generation.first_token,
            finished=now,
        )


def _never_fits(request: Request, error: NeverFits) -> InvalidJob:
    """Say in the job's own terms which of the scheduler's limits it exceeds."""
    holds, code = {
        "max_model_len": ("the model's context holds", ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        "kv_cache_tokens": ("the KV cache holds", ErrorCode.KV_CAPACITY_EXCEEDED),
    }[error.field]
    return InvalidJob(
        f"params.max_tokens: {len(request.prompt_token_ids)} prompt tokens and up to"
        f" {request.params.max_tokens} generated ones are {error.needed}; {holds} {error.limit}",
        field="params.max_tokens",
        limit=error.limit,
        code=code,
    )
