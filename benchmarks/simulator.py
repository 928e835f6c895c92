"""The real scheduler on a virtual clock: plans cost what the roofline says, and nothing is computed.

All that the scheduler decides, it decides as it would in a worker: who is admitted, preempted,
swapped out, found in the prefix cache. Only the seconds are made up, and added up: copies, then the
forward pass, though on a GPU what a worker swaps out leaves beside the pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from request_trace import MAX_TOKENS, TracedRequest
from roofline import Roofline, work_of

from tidemill_scheduler import NeverFits, Scheduler, SchedulerConfig, Sequence, SequenceId, StepPlan

MEASURED_TOKENS = 2048
"""The most of a prompt that a worker's runner computes to measure what restoring costs; the constant of that
name in `runner.py`, which cannot be had without torch."""


@dataclass(slots=True)
class Response:
    """What became of one request; times are seconds of the virtual clock."""

    request: TracedRequest
    num_tokens: int = 0
    """Generated so far."""
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.num_tokens == self.request.output_tokens

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival."""
        return self.first_token - self.request.arrival

    @property
    def response_time(self) -> float:
        """Seconds from arrival to the last token."""
        return self.last_token - self.request.arrival


@dataclass(slots=True)
class History:
    """One entry a step, as the scheduler stood when it had planned it."""

    times: array[float] = field(default_factory=lambda: array("d"))
    """Seconds at the step's end."""
    seconds: array[float] = field(default_factory=lambda: array("d"))
    """What the step took."""
    kv_usage: array[float] = field(default_factory=lambda: array("d"))
    swap_usage: array[float] = field(default_factory=lambda: array("d"))
    running: array[int] = field(default_factory=lambda: array("q"))
    waiting: array[int] = field(default_factory=lambda: array("q"))

    def append(self, now: float, seconds: float, scheduler: Scheduler) -> None:
        self.times.append(now)
        self.seconds.append(seconds)
        self.kv_usage.append(scheduler.kv_usage)
        self.swap_usage.append(scheduler.swap_usage)
        self.running.append(scheduler.num_running)
        self.waiting.append(scheduler.num_waiting)


@dataclass(slots=True)
class Simulation:
    """What happened."""

    scheduler: Scheduler
    """At its end, for its counters."""
    responses: list[Response] = field(default_factory=list)
    """Of all requests that were taken, in the order of arrival."""
    refused: list[tuple[TracedRequest, NeverFits]] = field(default_factory=list)
    """Those that could not be finished even alone, and why."""
    history: History = field(default_factory=History)
    gaps: array[float] = field(default_factory=lambda: array("d"))
    """Seconds between consecutive tokens of one response, over all of them."""
    num_computed_tokens: int = 0
    """Of all rows, those computed again included."""

    @property
    def num_output_tokens(self) -> int:
        return sum(response.num_tokens for response in self.responses)


def measured_chunk(config: SchedulerConfig, context: int) -> int:
    """Tokens of the prompt that a worker's runner would measure with, for a model of so long a context."""
    room = min(config.num_blocks * config.block_size, context)
    return min(config.max_num_batched_tokens, MEASURED_TOKENS, room)


class Simulator:
    """Plays one trace, in order of arrival, through one scheduler."""

    def __init__(self, config: SchedulerConfig, roofline: Roofline, trace: Items[TracedRequest]) -> None:
        if config.block_size != roofline.block_size:
            raise ValueError(
                f"block_size is {config.block_size} in the scheduler, {roofline.block_size} in the cost model"
            )
        self._scheduler = Scheduler(config)
        self._scheduler.costs = roofline.restore_costs(measured_chunk(config, roofline.model.max_model_len))
        self._roofline = roofline
        self._trace = trace
        self._num_arrived = 0
        self._now = 0.0
        self._open: dict[SequenceId, Response] = {}
        self._groups: dict[str | int, int] = {}
        self._simulation = Simulation(self._scheduler)

    def run(self) -> Simulation:
        """Step until every request has all its tokens.

        Raises:
            RuntimeError: if the scheduler plans nothing though requests are left and none is to come.
        """
        while self._num_arrived < len(self._trace) or self._open:
            self._take_arrivals()
            plan = self._scheduler.schedule()
            if plan.is_empty:
                self._wait_for_arrival()
            else:
                self._execute(plan)
        return self._simulation

    def _take_arrivals(self) -> None:
        while self._num_arrived < len(self._trace):
            request = self._trace[self._num_arrived]
            if request.arrival > self._now:
                return
            self._add(SequenceId(self._num_arrived), request)
            self._num_arrived += 1

    def _add(self, number: SequenceId, request: TracedRequest) -> None:
        sequence = Sequence(
            id=number,
            token_ids=self._token_ids(number, request),
            num_prompt_tokens=request.prompt_tokens,
            max_total_tokens=request.prompt_tokens + request.output_tokens,
            priority=request.priority,
            salt=request.tenant.encode(),
        )
        try:
            self._scheduler.add(sequence)
        except NeverFits as error:
            self._simulation.refused.append((request, error))
            return
        response = self._open[number] = Response(request)
        self._simulation.responses.append(response)

    def _token_ids(self, number: int, request: TracedRequest) -> list[int]:
        """Token ids that no other prompt has, behind those of the group's prefix, which are negative."""
        num_shared, first = 0, (number + 1) * MAX_TOKENS
        shared: range = range(0)
        if request.prefix is not None:
            group = self._groups.setdefault(request.prefix.group, len(self._groups))
            num_shared, last = request.prefix.tokens, -group * MAX_TOKENS - 1
            shared = range(last, last - num_shared, -1)
        return [*shared, *range(first + num_shared, first + request.prompt_tokens)]

    def _wait_for_arrival(self) -> None:
        if self._num_arrived < len(self._trace):
            self._now = self._trace[self._num_arrived].arrival
        elif self._open:
            raise RuntimeError(
                f"nothing is planned at {self._now:.3f} s, {len(self._open)} requests are left"
            )

    def _execute(self, plan: StepPlan) -> None:
        simulation, work = self._simulation, work_of(plan)
        seconds = self._roofline.step_seconds(work)
        self._now += seconds
        simulation.num_computed_tokens += work.num_tokens
        simulation.history.append(self._now, seconds, self._scheduler)
        sampled = {row.sequence: int(row.sequence) for row in plan.rows if row.sample}
        for number in self._scheduler.update(plan.step_id, sampled):
            self._take_token(number)

    def _take_token(self, number: SequenceId) -> None:
        """One more token of a response; its id is the request's number, so that no two texts are alike."""
        response = self._open[number]
        if response.num_tokens:
            self._simulation.gaps.append(self._now - response.last_token)
        else:
            response.first_token = self._now
        response.num_tokens += 1
        response.last_token = self._now
        if response.is_complete:
            del self._open[number]
            self._scheduler.finish(number)
