"""How much room admitting leaves, and what a preemption changes about it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.factories import MiniEngine, make_scheduler, make_sequence, step
from tidemill_scheduler import Scheduler, Sequence, SequenceId
from tidemill_scheduler.sequence import SequenceState


def is_running(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.RUNNING


class TestReserve:
    """Of 20 blocks of 4 tokens a tenth, two, stays free."""

    def make_reserving(self) -> tuple[Scheduler, Sequence]:
        """A scheduler whose first sequence runs and holds ten blocks."""
        scheduler = make_scheduler(num_blocks=20, block_size=4, watermark=0.1)
        scheduler.add(first := make_sequence(0, prompt=39, new=20))
        step(scheduler)
        return scheduler, first

    @pytest.mark.parametrize(("blocks", "fits"), [(8, True), (9, False)])
    def test_stays_free_of_newcomers(self, blocks: int, fits: bool) -> None:
        scheduler, _ = self.make_reserving()
        scheduler.add(second := make_sequence(1, prompt=4 * blocks))
        step(scheduler)
        assert is_running(second) == fits

    def test_is_there_for_those_who_run(self) -> None:
        scheduler, first = self.make_reserving()
        scheduler.add(make_sequence(1, prompt=31))
        for _ in range(3):
            step(scheduler)
        assert len(first.block_table) == 11
        assert scheduler.counters.num_preemptions == 0

    def test_is_not_kept_from_one_that_is_alone(self) -> None:
        engine = MiniEngine(num_blocks=20, block_size=4, watermark=0.2)
        engine.add(make_sequence(0, prompt=79, new=2), make_sequence(1, prompt=79, new=2))
        engine.run()
        assert engine.finished == [0, 1]

    def test_may_be_used_to_displace_lower_ones(self) -> None:
        scheduler, first = self.make_reserving()
        scheduler.add(high := make_sequence(1, prompt=76, new=2, priority=0))
        step(scheduler)
        step(scheduler)
        assert (is_running(high), is_running(first)) == (True, False)


class TestRelief:
    """After a preemption, of 20 blocks eight have to be free: four times a tenth."""

    def make_pressed(self, *, watermark: float = 0.1) -> MiniEngine:
        """Of three decodes the last gave way and left four blocks; the second ends before the first."""
        engine = MiniEngine(num_blocks=20, block_size=4, watermark=watermark)
        engine.add(make_sequence(0, prompt=23, new=40), make_sequence(1, prompt=23, new=16))
        engine.add(victim := make_sequence(2, prompt=23, new=40))
        while engine.scheduler.counters.num_preemptions == 0:
            engine.step()
        assert not is_running(victim)
        assert engine.scheduler._memory.pool.num_free == 4
        return engine

    def test_nobody_is_admitted_before_it(self) -> None:
        engine = self.make_pressed()
        engine.add(make_sequence(3, prompt=4, new=1))
        while SequenceId(1) not in engine.finished:
            assert is_running(engine.sequences[SequenceId(1)])
            assert engine.rows_of(3) == []
            engine.step()
        assert engine.scheduler._memory.pool.num_free >= 8
        engine.step()
        assert is_running(engine.sequences[SequenceId(2)])
        assert SequenceId(3) in engine.finished
        engine.run()

    def test_without_a_watermark_they_are_at_once(self) -> None:
        engine = self.make_pressed(watermark=0.0)
        engine.add(small := make_sequence(3, prompt=4, new=1))
        engine.step()
        assert small.id in engine.finished
        engine.run()

    def test_those_who_run_grow_meanwhile(self) -> None:
        engine = self.make_pressed()
        first = engine.sequences[SequenceId(0)]
        known, blocks = first.num_output_tokens, len(first.block_table)
        for number in range(1, 6):
            engine.step()
            assert first.num_output_tokens == known + number
        assert len(first.block_table) == blocks + 1

    def test_is_not_waited_for_when_nobody_runs(self) -> None:
        """Given plans in flight that still hold back what was given up, nobody waits for them."""
        engine = MiniEngine(num_blocks=20, block_size=4, watermark=0.2, in_flight=2)
        engine.add(make_sequence(0, prompt=70, new=8))
        engine.step()
        engine.scheduler.preempt(SequenceId(0))
        engine.add(make_sequence(1, prompt=70, new=8))
        engine.run()
        assert engine.finished == [0, 1]

    def test_spares_preemptions(self) -> None:
        """Given more decodes than fit, with room to grow most of them are left alone."""
        preemptions = {}
        for watermark in (0.0, 0.1):
            engine = MiniEngine(num_blocks=40, block_size=4, watermark=watermark, max_num_seqs=32)
            engine.add(*(make_sequence(number, prompt=10, new=30) for number in range(24)))
            engine.run()
            preemptions[watermark] = engine.scheduler.counters.num_preemptions
        assert preemptions[0.1] < preemptions[0.0]


WORK = st.tuples(st.integers(1, 14), st.integers(1, 10), st.integers(0, 2), st.integers(0, 3))
"""Prompt, new tokens, priority, and the steps until the next one comes."""


@settings(max_examples=150, deadline=None)
@given(
    work=st.lists(WORK, min_size=2, max_size=14),
    num_blocks=st.integers(6, 12),
    in_flight=st.integers(1, 2),
    changes=st.fixed_dictionaries(
        {"watermark": st.sampled_from([0.0, 0.1, 0.2]), "num_swap_blocks": st.sampled_from([0, 4, 40])}
    ),
)
def test_the_first_in_the_order_of_service_is_never_preempted(
    work: list[tuple[int, int, int, int]], num_blocks: int, in_flight: int, changes: dict[str, Any]
) -> None:
    """So something always comes to its end."""
    engine = MiniEngine(in_flight=in_flight, num_blocks=num_blocks, ageing_steps=8, **changes)
    for number, (prompt, new, priority, pause) in enumerate(work):
        engine.add(make_sequence(number, prompt=prompt, new=new, priority=priority))
        for _ in range(pause):
            step_watching_the_first(engine)
    for _ in range(500):
        if not engine.unfinished():
            break
        step_watching_the_first(engine)
    engine.run()
    engine.check_baseline()


def step_watching_the_first(engine: MiniEngine) -> None:
    """Step, and see that the first of all in the order has not been preempted."""
    unfinished = [engine.sequences[number] for number in engine.unfinished()]
    first = min(unfinished, key=lambda sequence: sequence.rank, default=None)
    before = first.num_preemptions if first else 0
    engine.step()
    assert first is None or first.num_preemptions == before


def test_nor_is_the_oldest_of_the_highest_priority() -> None:
    engine = MiniEngine(num_blocks=8, block_size=4)
    engine.add(*(make_sequence(number, prompt=7, new=20, priority=2) for number in range(3)))
    for _ in range(4):
        engine.step()
    engine.add(oldest := make_sequence(3, prompt=7, new=20, priority=0))
    engine.add(*(make_sequence(number, prompt=7, new=20, priority=0) for number in range(4, 7)))
    engine.run()
    assert engine.scheduler.counters.num_preemptions > 2
    assert oldest.num_preemptions == 0
    assert engine.finished[0] == oldest.id
