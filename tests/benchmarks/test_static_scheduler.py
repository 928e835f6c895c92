"""Static batching as a scheduler: one batch after another, and what is computed for nobody."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from static_batching import StaticScheduler

from tests.scheduler.factories import make_config, make_sequence
from tidemill_scheduler import NeverFits, SchedulerConfig, SequenceId, StepPlan

Lengths = tuple[int, int]
"""Tokens of a prompt, and of the output after it."""

CONFIG = make_config(num_blocks=200, enable_prefix_caching=False)
KINDS = list(product((False, True), repeat=2))
"""Whether prompts are padded, and whether ended sequences are kept."""
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=12)


@dataclass
class Clock:
    """Stands still until it is moved."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def make_static(
    *,
    batch_size: int = 2,
    pads_prompts: bool = False,
    keeps_ended: bool = False,
    config: SchedulerConfig = CONFIG,
    clock: Clock | None = None,
) -> StaticScheduler:
    """Without a clock, a batch that is not full begins at once."""
    return StaticScheduler(
        config,
        batch_size=batch_size,
        pads_prompts=pads_prompts,
        keeps_ended=keeps_ended,
        max_queue_delay=1.0 if clock else 0.0,
        clock=clock or Clock(),
    )


@dataclass
class Caller:
    """Runs what is planned, as the engine does, on a model that always says 7."""

    scheduler: StaticScheduler
    lengths: Sequence[Lengths]
    seen: list[frozenset[int]] = field(default_factory=list)
    """The sequences that each step's plan names to the engine."""
    num_tokens: int = 0
    """Computed, the padding of prompts included."""

    def __post_init__(self) -> None:
        self.unfinished = {}
        for number, (prompt, new) in enumerate(self.lengths):
            sequence = make_sequence(number, prompt=prompt, new=new)
            self.unfinished[sequence.id] = sequence, new
            self.scheduler.add(sequence)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        padded = self.scheduler.padded_plan
        self.seen.append(frozenset(row.sequence for row in plan.rows))
        self.num_tokens += padded.num_tokens + self.scheduler.take_padding()
        self.scheduler.update(padded.step_id, {row.sequence: 7 for row in padded.rows if row.sample})
        self._finish(row.sequence for row in plan.rows)
        self.scheduler.check_integrity()
        return plan

    def _finish(self, planned: Iterable[SequenceId]) -> None:
        for number in planned:
            sequence, new = self.unfinished[number]
            if sequence.num_output_tokens == new:
                del self.unfinished[number]
                self.scheduler.finish(number)

    def run(self) -> None:
        while self.unfinished:
            assert self.step().rows, "a step brings nobody anything"


def longest_prompt(batch: Sequence[Lengths]) -> int:
    return max(prompt for prompt, _ in batch)


def longest_output(batch: Sequence[Lengths]) -> int:
    return max(new for _, new in batch)


def batches(lengths: Sequence[Lengths], size: int) -> list[Sequence[Lengths]]:
    return [lengths[first : first + size] for first in range(0, len(lengths), size)]


@pytest.mark.parametrize(("pads_prompts", "keeps_ended"), KINDS)
@given(lengths=LENGTHS, batch_size=st.integers(1, 5))
def test_a_batch_begins_when_the_last_of_the_one_before_has_ended(
    pads_prompts: bool, keeps_ended: bool, lengths: list[Lengths], batch_size: int
) -> None:
    static = make_static(batch_size=batch_size, pads_prompts=pads_prompts, keeps_ended=keeps_ended)
    caller = Caller(static, lengths)
    caller.run()
    # In the order of arrival, and no step has sequences of two batches.
    begun = [{number // batch_size for number in step} for step in caller.seen]
    assert all(len(batch) == 1 for batch in begun)
    order = [batch for (batch,) in map(tuple, begun)]
    assert order == sorted(order)
    assert not caller.scheduler.has_unfinished
    assert caller.scheduler.kv_usage == 0.0


@given(lengths=LENGTHS, batch_size=st.integers(1, 5))
def test_shrinking_computes_what_is_needed_and_no_more(lengths: list[Lengths], batch_size: int) -> None:
    caller = Caller(make_static(batch_size=batch_size), lengths)
    caller.run()
    assert caller.num_tokens == sum(prompt + new - 1 for prompt, new in lengths)


@pytest.mark.parametrize(
    ("pads_prompts", "keeps_ended", "expected"),
    [
        (False, False, (3 + 12 + 5) + (8 + 1 + 0) + (7 + 1 + 2) + (3 + 5 + 1)),
        (False, True, (3 + 12 + 5) + 3 * 8 + (7 + 1 + 2) + 3 * 5),  # packed
        (True, False, 3 * 12 + (8 + 1 + 0) + 3 * 7 + (3 + 5 + 1)),
        (True, True, 3 * 12 + 3 * 8 + 3 * 7 + 3 * 5),  # padded
    ],
)
def test_prompts_and_outputs_are_each_computed_to_the_longest_if_that_is_asked_for(
    pads_prompts: bool, keeps_ended: bool, expected: int
) -> None:
    # A last token is never computed. The prompts of a batch fit in one step, so that its rows walk abreast.
    lengths = [(3, 9), (12, 2), (5, 1), (7, 4), (1, 6), (2, 2)]
    caller = Caller(make_static(batch_size=3, pads_prompts=pads_prompts, keeps_ended=keeps_ended), lengths)
    caller.run()
    assert caller.num_tokens == expected


@pytest.mark.parametrize("pads_prompts", [False, True])
@given(lengths=LENGTHS, batch_size=st.integers(1, 5))
def test_no_row_is_computed_beyond_the_longest(
    pads_prompts: bool, lengths: list[Lengths], batch_size: int
) -> None:
    static = make_static(batch_size=batch_size, pads_prompts=pads_prompts, keeps_ended=True)
    caller = Caller(static, lengths)
    caller.run()
    most = sum(
        (longest_prompt(batch) if pads_prompts else prompt) + longest_output(batch) - 1
        for batch in batches(lengths, batch_size)
        for prompt, _ in batch
    )
    assert sum(prompt + new - 1 for prompt, new in lengths) <= caller.num_tokens <= most


def test_a_batch_waits_for_more_but_not_for_long() -> None:
    clock = Clock()
    scheduler = make_static(batch_size=3, clock=clock)
    scheduler.add(make_sequence(0))
    clock.now = 0.9
    scheduler.add(make_sequence(1))
    assert scheduler.schedule().is_empty
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    clock.now = 1.0
    assert len(scheduler.schedule().rows) == 2


def test_a_full_batch_waits_for_nobody() -> None:
    scheduler = make_static(batch_size=2, clock=Clock())
    for number in range(3):
        scheduler.add(make_sequence(number))
    assert len(scheduler.schedule().rows) == 2
    assert scheduler.num_waiting == 1


def test_one_that_waits_can_be_let_go_of() -> None:
    scheduler = make_static()
    scheduler.add(make_sequence(0))
    scheduler.finish(SequenceId(0))
    assert scheduler.schedule().is_empty
    assert not scheduler.has_unfinished


def test_one_that_is_too_long_is_refused_at_once() -> None:
    with pytest.raises(NeverFits, match="max_model_len"):
        make_static().add(make_sequence(0, prompt=100, new=29))


@pytest.mark.parametrize(("num_blocks", "largest"), [(300, 8), (100, 3), (31, 0)])
def test_a_batch_that_might_not_fit_is_refused(num_blocks: int, largest: int) -> None:
    # Each row may become 32 blocks long, and 1 % of them stays free.
    config = make_config(num_blocks=num_blocks, max_num_seqs=8, max_model_len=128, watermark=0.01)
    with pytest.raises(ValueError, match=f"batch_size is {largest + 1}, must be 1 to {largest}: "):
        make_static(batch_size=largest + 1, config=config)
