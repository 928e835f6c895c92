"""What a step costs does not depend on how many wait: counted, not timed.

A sequence is touched when any attribute of it is read. The heap moves entries without touching the
sequences in them, and its work grows as the logarithm of their number.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from tests.scheduler.factories import make_config, make_tokens
from tidemill_scheduler import Scheduler, Sequence, SequenceId

FEW, MANY = 300, 100_000
RUNNING = 16
PROMPTS = [make_tokens(6, first=1000 * number) for number in range(64)]
"""Few enough that many sequences share one; none has a full block of its own."""


class Watched(Sequence):
    """A sequence that counts how often it is touched, by its id."""

    __slots__ = ("touched",)

    def __init__(self, touched: Counter[int], number: int, **fields: Any) -> None:
        object.__setattr__(self, "touched", touched)
        super().__init__(id=SequenceId(number), **fields)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        object.__getattribute__(self, "touched")[object.__getattribute__(self, "id")] += name != "id"
        return value


class Crowd:
    """A scheduler with `RUNNING` sequences running at most, and as many as wanted behind them."""

    def __init__(self, waiting: int, **changes: Any) -> None:
        self.touched: Counter[int] = Counter()
        sizes = {"max_num_seqs": RUNNING, "num_blocks": 200, "block_size": 8}
        self.scheduler = Scheduler(make_config(**(sizes | changes)))
        self.sequences: dict[SequenceId, Sequence] = {}
        for number in range(RUNNING + waiting):
            self._add(number)

    def _add(self, number: int) -> None:
        """Outputs of 6 to 21 tokens, so that those which begin together do not end together."""
        sequence = Watched(
            self.touched,
            number,
            token_ids=list(PROMPTS[number % len(PROMPTS)]),
            num_prompt_tokens=6,
            max_total_tokens=12 + 5 * number % 16,
        )
        self.sequences[sequence.id] = sequence
        self.scheduler.add(sequence)

    def step(self) -> None:
        """Schedule, update, and finish whoever has its last token."""
        plan = self.scheduler.schedule()
        received = self.scheduler.update(plan.step_id, {row.sequence: 7 for row in plan.rows if row.sample})
        for sequence_id in received:
            sequence = self.sequences[sequence_id]
            if len(sequence.token_ids) == sequence.max_total_tokens:
                self.scheduler.finish(sequence_id)


def touches(waiting: int, *, steps: int = 60, **changes: Any) -> tuple[int, int]:
    """How many sequences the steps touch, and how often."""
    crowd = Crowd(waiting, **changes)
    crowd.touched.clear()
    for _ in range(steps):
        crowd.step()
    assert crowd.scheduler.num_waiting > waiting / 2, "too few wait for the comparison to mean anything"
    return sum(map(bool, crowd.touched.values())), crowd.touched.total()


def calls(waiting: int, *, steps: int = 60, **changes: Any) -> int:
    """How many functions the steps call, Python's and C's."""
    crowd, count = Crowd(waiting, **changes), 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(steps):
            crowd.step()
    finally:
        sys.setprofile(before)
    return count


SITUATIONS = [
    {},  # memory for all that may run: whoever ends is replaced
    {"num_blocks": 20},  # too little: they preempt each other, and the next in line does not fit
    {"num_blocks": 20, "num_swap_blocks": 40},
]


@pytest.mark.parametrize("changes", SITUATIONS, ids=["enough", "scarce", "scarce with swap"])
def test_a_step_touches_as_many_sequences_however_many_wait(changes: dict[str, int]) -> None:
    assert touches(MANY, **changes) == touches(FEW, **changes)


@pytest.mark.parametrize("changes", SITUATIONS, ids=["enough", "scarce", "scarce with swap"])
def test_a_step_calls_as_many_functions_however_many_wait(changes: dict[str, int]) -> None:
    assert calls(MANY, **changes) == calls(FEW, **changes)


def test_scarce_memory_preempts() -> None:
    """Else two of the situations above would be the first one again."""
    crowd = Crowd(FEW, num_blocks=20)
    for _ in range(60):
        crowd.step()
    assert crowd.scheduler.num_preemptions > 0
