"""What a step costs does not depend on how many wait: counted, not timed.

Counted are the calls of functions, Python's and C's, and every attribute of a sequence that is read.
What one call of C does inside is not counted: the heap's moves, whose number grows as the logarithm.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from tests.scheduler.factories import make_config, make_tokens
from tidemill_scheduler import Scheduler, Sequence, SequenceId

FEW, MANY = 300, 100_000
STEPS = 60
SITUATIONS = {
    "enough memory": {},
    "scarce memory": {"num_blocks": 20},  # they preempt each other, and the next in line does not fit
    "scarce memory and swap": {"num_blocks": 20, "num_swap_blocks": 40},
}


class Watched(Sequence):
    """A sequence whose attributes can be watched without slowing down any other's."""

    __slots__ = ()


@dataclass
class Work:
    """What was done while it was watched."""

    calls: int = 0
    touched: set[int] = field(default_factory=set)
    """Sequences of which an attribute was read."""


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    work = Work()

    def read(sequence: Watched, name: str) -> Any:
        work.touched.add(id(sequence))
        return object.__getattribute__(sequence, name)

    def note(frame: FrameType, event: str, argument: object) -> None:
        work.calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # a collection calls whoever watches it, which is no part of a step
    with monkeypatch.context() as patch:
        patch.setattr(Watched, "__getattribute__", read)
        sys.setprofile(note)
        try:
            yield work
        finally:
            sys.setprofile(before)
            gc.enable()


class Crowd:
    """A scheduler that may run 16 sequences, and as many as wanted in it."""

    def __init__(self, count: int, **changes: int) -> None:
        sizes = {"max_num_seqs": 16, "num_blocks": 200, "block_size": 8}
        self.scheduler = Scheduler(make_config(**(sizes | changes)))
        self.sequences = [self._make(number) for number in range(count)]
        for sequence in self.sequences:
            self.scheduler.add(sequence)

    def _make(self, number: int) -> Sequence:
        """Outputs of 6 to 21 tokens, so that those which begin together do not end together."""
        return Watched(
            id=SequenceId(number),
            token_ids=make_tokens(6, first=10 * number),
            num_prompt_tokens=6,
            max_total_tokens=12 + 5 * number % 16,
        )

    def step(self) -> None:
        """Schedule, update, and finish whoever has its last token."""
        plan = self.scheduler.schedule()
        received = self.scheduler.update(plan.step_id, {row.sequence: 7 for row in plan.rows if row.sample})
        for sequence_id in received:
            sequence = self.sequences[sequence_id]
            if len(sequence.token_ids) == sequence.max_total_tokens:
                self.scheduler.finish(sequence_id)


def watch(count: int, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]) -> Work:
    """What the steps of a scheduler do that so many sequences were added to."""
    crowd = Crowd(count, **changes)
    with watching(monkeypatch) as work:
        for _ in range(STEPS):
            crowd.step()
    assert len(work.touched) < crowd.scheduler.num_waiting, "too few wait for this to mean anything"
    assert (crowd.scheduler.counters.num_preemptions > 0) == ("num_blocks" in changes)
    return work


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_step_does_as_much_however_many_wait(situation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (watch(count, monkeypatch, SITUATIONS[situation]) for count in (FEW, MANY))
    assert len(many.touched) == len(few.touched)
    assert many.calls == few.calls
