"""The engine: continuous batching, one step at a time.

`Engine.step` is the whole product in five lines: end what is late, schedule, run, update, answer. It
owns no clock, no thread, no socket and no tensor; the service calls it in a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import ErrorInfo, FinishReason
from tidemill.params import SamplingParams
from tidemill_scheduler import NeverFits, RestoreCosts, Scheduler, SequenceId, StepPlan
from tidemill_scheduler import Sequence as ScheduledSequence
from tidemill_worker.deadlines import Deadlines
from tidemill_worker.generation import Generation, Marks, OpenRequest, RankedToken
from tidemill_worker.request import Ending, OpenChoice, Request, ending_after, ignores_end_of_text

DEADLINE_PASSED = ErrorInfo(
    code=ErrorCode.DEADLINE_EXCEEDED,
    message="the deadline passed before the request finished",
    field="deadline",
)


class StepTokens(Protocol):
    """What the model made of a plan."""

    @property
    def tokens(self) -> Mapping[SequenceId, int]:
        """The next token of each sequence whose row samples, negative if it has none."""

    @property
    def logprobs(self) -> Mapping[SequenceId, RankedToken]:
        """Of these tokens, where they were asked for."""

    @property
    def prompt_logprobs(self) -> Mapping[SequenceId, Sequence[RankedToken]]:
        """Where they were asked for: of the prompt's tokens from behind the row's first position on."""


class Runner(Protocol):
    """Executes a plan on the model; see `tidemill_worker.model.runner`."""

    @property
    def costs(self) -> RestoreCosts:
        """What computing and copying take here, as measured last."""

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> StepTokens:
        """Copy the blocks, compute the rows of `plan` and draw the tokens that follow on them."""


@dataclass(frozen=True)
class StepOutput:
    """What one step brought one generation."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[RankedToken, ...] = ()
    """One for each of `token_ids`, if they were asked for."""
    finish_reason: FinishReason | None = None
    """Set when this is the generation's last output."""
    stop_reason: str | int | None = None
    error: ErrorInfo | None = None
    """Why the whole request ends here, without all that was asked for."""
    marks: Marks | None = None
    """Set, like the rest, when this is the request's last output, unless nothing of it was begun."""
    prompt_logprobs: tuple[RankedToken, ...] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether nothing more will come for this request."""
        return self.marks is not None or self.error is not None

    @property
    def expired(self) -> bool:
        """Whether the request ends here because its deadline has passed."""
        return self.error is not None and self.error.code is ErrorCode.DEADLINE_EXCEEDED


@dataclass(frozen=True)
class EngineStats:
    """A look at the engine between two steps; what counts, counts from its start."""

    num_running: int
    num_rows: int
    """Generations that the last step computed something of; some of them may have ended with it."""
    num_waiting: int
    num_aside: int
    """Those of `num_waiting` that need nothing but what another one is computing."""
    kv_usage: float
    swap_usage: float
    num_preemptions: int
    num_swap_preemptions: int
    blocks_swapped_out: int
    blocks_swapped_in: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    swap_hit_tokens: int
    """Those of `prefix_hit_tokens` that were found in the swap space."""
    recomputed_tokens: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    """Steps that computed or copied something."""

    @property
    def num_without_room(self) -> int:
        """Generations that wait for a slot, for tokens of a step, or for memory."""
        return self.num_waiting - self.num_aside


@dataclass
class Engine:
    """Owns the scheduler and the generations in flight; one thread at a time may use it."""

    runner: Runner
    scheduler: Scheduler
    end_of_text: frozenset[int]
    clock: Callable[[], float] = time.monotonic
    _requests: dict[str, OpenRequest] = field(default_factory=dict)
    _generations: dict[SequenceId, Generation] = field(default_factory=dict)
    _deadlines: Deadlines = field(default_factory=Deadlines)
    _num_added: int = 0
    _num_rows: int = 0
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
        if request.id in self._requests:
            raise InvalidJob(f"id: {request.id} is being generated already", field="id")
        owner = OpenRequest(request, added=self.clock())
        for choice in request.choices or (None,):
            self._begin(owner, choice)
        self._requests[request.id] = owner
        if request.deadline is not None:
            self._deadlines.add(request.id, request.deadline)

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds; unknown ones are none of our business."""
        owner = self._requests.pop(request_id, None)
        self._deadlines.discard(request_id)
        if owner is not None:
            for sequence_id in owner.generations:
                del self._generations[sequence_id]
                self.scheduler.finish(sequence_id)

    def step(self) -> list[StepOutput]:
        """Run one step; return what it brought to each generation that got a token, or came to its end.

        What is late when the step begins ends before it costs anything.
        """
        expired = self._expire(self.clock())
        self.scheduler.costs = self.runner.costs
        plan = self.scheduler.schedule()
        self._num_rows = len(plan.rows)
        if plan.is_empty:
            return expired
        self._mark_scheduled(plan)
        result = self.runner.run(plan, self._generations)
        self.scheduler.update(plan.step_id, result.tokens)
        self._num_steps += 1
        self._collect_prompt_logprobs(plan, result)
        advanced = (sequence for sequence in result.tokens if sequence in self._generations)
        return expired + [self._advance(sequence, result) for sequence in advanced]

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
            num_rows=self._num_rows,
            num_waiting=scheduler.num_waiting,
            num_aside=scheduler.num_aside,
            kv_usage=scheduler.kv_usage,
            swap_usage=scheduler.swap_usage,
            num_preemptions=scheduler.counters.num_preemptions,
            num_swap_preemptions=scheduler.counters.num_swap_preemptions,
            blocks_swapped_out=scheduler.counters.num_blocks_swapped_out,
            blocks_swapped_in=scheduler.counters.num_blocks_swapped_in,
            prefix_query_tokens=scheduler.counters.num_prefix_query_tokens,
            prefix_hit_tokens=scheduler.counters.num_prefix_hit_tokens,
            swap_hit_tokens=scheduler.counters.num_swap_hit_tokens,
            recomputed_tokens=scheduler.counters.num_recomputed_tokens,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_steps=self._num_steps,
        )

    def _begin(self, owner: OpenRequest, choice: OpenChoice | None) -> None:
        """Let one generation wait for its turn; those after the first fork from it."""
        request, params = owner.request, owner.request.params
        first = next(iter(owner.generations), None)
        computes_prompt = first is None and params.prompt_logprobs is not None
        num_prompt_tokens = len(request.prompt_token_ids)
        sequence = ScheduledSequence(
            id=SequenceId(self._num_added),
            token_ids=[*request.prompt_token_ids, *(choice.output_token_ids if choice else ())],
            num_prompt_tokens=num_prompt_tokens,
            priority=request.priority,
            deadline=request.deadline,
            salt=request.salt,
            max_total_tokens=num_prompt_tokens + (params.max_tokens if choice else 1),
            fork_of=first,
            compute_prompt=computes_prompt,
        )
        try:
            self.scheduler.add(sequence)
        except NeverFits as error:
            raise _never_fits(request, error) from error
        self._num_added += 1
        generation = Generation(owner, sequence, choice, self._end_tokens(params, choice), computes_prompt)
        owner.generations[sequence.id] = self._generations[sequence.id] = generation

    def _end_tokens(self, params: SamplingParams, choice: OpenChoice | None) -> frozenset[int]:
        goes_on = ignores_end_of_text(params, choice.grammar if choice else None)
        return frozenset(params.stop_token_ids).union(() if goes_on else self.end_of_text)

    def _expire(self, now: float) -> list[StepOutput]:
        """End all that goes on of each request whose deadline has passed, with the text so far."""
        outputs: list[StepOutput] = []
        for request_id in self._deadlines.pop_due(now):
            late = tuple(self._requests[request_id].generations.values())
            outputs += [self._cut_short(generation) for generation in late]
            outputs[-1] = replace(outputs[-1], error=DEADLINE_PASSED)
        return outputs

    def _cut_short(self, generation: Generation) -> StepOutput:
        choice = generation.open_choice
        output = StepOutput(generation.owner.request.id, (), "", generation.choice)
        if choice is None:
            return self._close(generation, output)
        return self._end(generation, choice, output, Ending(FinishReason.EXPIRED))

    def _mark_scheduled(self, plan: StepPlan) -> None:
        for row in plan.rows:
            generation = self._generations[row.sequence]
            owner = generation.owner
            if owner.request.scheduled is None:
                owner.request.scheduled = self.clock()
                # What a sibling finds later is what this one has computed.
                owner.num_cached_tokens = generation.sequence.num_cached_tokens

    def _collect_prompt_logprobs(self, plan: StepPlan, result: StepTokens) -> None:
        if not result.prompt_logprobs:
            return
        for row in plan.rows:
            ranked = result.prompt_logprobs.get(row.sequence, ())
            # What a preemption lost is computed again; it is the same.
            collected = self._generations[row.sequence].owner.prompt_logprobs
            collected[row.start : row.start + len(ranked)] = ranked

    def _advance(self, sequence: SequenceId, result: StepTokens) -> StepOutput:
        """Account for one sampled token and decide whether it is the last."""
        generation, token = self._generations[sequence], result.tokens[sequence]
        owner, choice = generation.owner, generation.open_choice
        if token < 0:
            return self._fail(generation)
        if owner.first_token is None:
            owner.first_token = self.clock()
            self._prompt_tokens += generation.num_prompt_tokens
        if choice is None:
            return self._close(generation, StepOutput(owner.request.id, (), ""))
        self._generation_tokens += 1
        ending = ending_after(
            token, generation.num_output_tokens, generation.params, self.end_of_text, choice
        )
        output = StepOutput(
            owner.request.id,
            (token,),
            choice.output_text.take(),
            choice.index,
            (result.logprobs[sequence],) if sequence in result.logprobs else (),
        )
        return output if ending is None else self._end(generation, choice, output, ending)

    def _end(
        self, generation: Generation, choice: OpenChoice, output: StepOutput, ending: Ending
    ) -> StepOutput:
        output = replace(
            output,
            text=output.text + choice.output_text.close(),
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
        )
        return self._close(generation, output)

    def _close(self, generation: Generation, output: StepOutput) -> StepOutput:
        """Let a generation go; the last of its request reports what concerns them all."""
        owner, sequence = generation.owner, generation.sequence.id
        del owner.generations[sequence], self._generations[sequence]
        self.scheduler.finish(sequence)
        if owner.generations:
            return output
        del self._requests[owner.request.id]
        self._deadlines.discard(owner.request.id)
        wanted = generation.params.prompt_logprobs is not None
        return replace(
            output,
            marks=owner.marks(self.clock()),
            prompt_logprobs=tuple(owner.prompt_logprobs) if wanted else None,
            num_cached_tokens=owner.num_cached_tokens,
        )

    def _fail(self, generation: Generation) -> StepOutput:
        """Give up a request whose model or grammar left no token to draw."""
        owner, choice = generation.owner, generation.open_choice
        reason = choice.grammar.error if choice and choice.grammar else None
        message = f"structured_outputs: {reason}" if reason else "the model's logits leave no token to draw"
        error = ErrorInfo(code=ErrorCode.INTERNAL, message=message)
        self.abort(owner.request.id)
        return StepOutput(
            owner.request.id,
            (),
            "",
            generation.choice,
            finish_reason=FinishReason.ERROR if choice else None,
            error=error,
            marks=owner.marks(self.clock()),
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
