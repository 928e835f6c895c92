"""Forks among others: what they wait for, whom they pass, and what a preemption does to a family."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.factories import (
    MiniEngine,
    make_decoding,
    make_family,
    make_fork,
    make_sequence,
    rows,
)
from tidemill_scheduler import SequenceId


class TestPreemption:
    @pytest.mark.parametrize("steps", range(1, 7))
    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("caching", [True, False])
    def test_of_the_parent_at_any_time(self, steps: int, in_flight: int, caching: bool) -> None:
        engine = MiniEngine(
            block_size=4,
            max_num_batched_tokens=9,
            max_prefill_chunk=6,
            in_flight=in_flight,
            enable_prefix_caching=caching,
        )
        engine.add(*make_family(prompt=15, siblings=4))
        for _ in range(steps):
            engine.step()
        engine.schedule()
        engine.scheduler.preempt(SequenceId(0))
        engine.run()
        assert sorted(engine.finished) == [0, 1, 2, 3]

    @pytest.mark.parametrize("steps", range(1, 7))
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_of_a_fork_at_any_time(self, steps: int, in_flight: int) -> None:
        engine = MiniEngine(block_size=4, in_flight=in_flight)
        engine.add(*make_family(prompt=7, siblings=4))
        for _ in range(steps):
            engine.step()
        engine.schedule()
        engine.scheduler.preempt(SequenceId(2))
        engine.scheduler.preempt(SequenceId(3))
        engine.run()
        assert sorted(engine.finished) == [0, 1, 2, 3]

    def test_a_preempted_parent_is_not_waited_for(self) -> None:
        """Here the fork is the first in the order and would wait for one that lacks memory."""
        engine = MiniEngine(max_num_batched_tokens=8, max_prefill_chunk=5)
        engine.add(parent := make_sequence(0, prompt=14, priority=1), make_fork(1, parent, priority=0))
        engine.step()
        assert engine.scheduler.num_running == 1
        engine.scheduler.preempt(parent.id)
        assert rows(engine.step()) == {1: (8, 6, True)}  # its parent's blocks were found in the cache
        engine.run()

    def test_but_is_again_once_it_runs_again(self) -> None:
        engine = MiniEngine(max_num_batched_tokens=8, max_prefill_chunk=5, max_num_seqs=4)
        engine.add(*make_family(prompt=14, siblings=3))
        engine.step()
        engine.scheduler.preempt(SequenceId(0))
        engine.run()
        assert [engine.rows_of(number)[0] for number in (1, 2)] == [(13, 1)] * 2

    def test_what_is_copied_from_keeps_its_content_when_the_parent_ends_in_flight(self) -> None:
        engine, parent = make_decoding(in_flight=2, num_blocks=5)
        engine.add(make_fork(1, parent, new=2))
        while engine.plans:
            engine.land()
        plan = engine.schedule()
        (copy,) = plan.block_copies
        engine.abort(parent.id)
        engine.add(make_sequence(2, prompt=8, new=1))
        engine.schedule()
        assert engine.scheduler._memory.pool.num_quarantined > 0
        assert not engine.scheduler._memory.pool.is_free(copy.source)
        engine.run()

    def test_a_fork_is_not_let_in_where_an_older_sequence_would_take_its_block(self) -> None:
        """Given one block of a sequence lower in priority, the older one takes it, and nothing is copied."""
        engine = MiniEngine(block_size=4, num_blocks=5)
        engine.add(make_sequence(0, prompt=7, priority=0), parent := make_sequence(1, prompt=7, priority=0))
        engine.add(lower := make_sequence(2, prompt=3, new=3, priority=2))
        engine.step()
        engine.step()
        engine.add(fork := make_fork(3, parent, priority=1))
        plan = engine.schedule()
        assert (lower.num_preemptions, fork.num_preemptions) == (1, 0)
        assert (rows(plan), plan.block_copies) == ({0: (8, 1, True)}, ())
        engine.land()
        engine.run()

    def test_a_fork_of_a_victim_may_come_to_stand_before_the_one_it_gave_way_to(self) -> None:
        engine = MiniEngine(max_num_seqs=1, max_num_batched_tokens=8, max_prefill_chunk=5)
        engine.add(parent := make_sequence(0, prompt=20, priority=2), make_fork(1, parent, priority=0))
        engine.step()
        engine.add(make_sequence(2, priority=1, new=2))
        assert set(rows(engine.step())) == {1}
        engine.run()
        assert sorted(engine.finished) == [0, 1, 2]


class TestDeferral:
    def make_deferred(self, **changes: Any) -> MiniEngine:
        """A parent of 20 tokens that computes 5 a step, and two forks."""
        engine = MiniEngine(max_num_batched_tokens=10, max_prefill_chunk=5, **changes)
        engine.add(*make_family(prompt=20, siblings=3))
        return engine

    def test_they_count_among_the_waiting(self) -> None:
        engine = self.make_deferred()
        engine.step()
        assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 2)

    def test_nobody_is_held_up_by_them(self) -> None:
        engine = self.make_deferred(max_num_seqs=2)
        engine.add(make_sequence(3, prompt=4))
        assert set(rows(engine.step())) == {0, 3}
        engine.run()

    def test_nor_displaced_for_them(self) -> None:
        engine = MiniEngine(max_num_seqs=2, max_num_batched_tokens=10, max_prefill_chunk=5)
        engine.add(make_sequence(9, prompt=4, new=30, priority=2))
        engine.step()
        engine.add(*make_family(prompt=20, siblings=2, priority=0))
        for _ in range(4):
            assert set(rows(engine.step())) == {0, 9}
        assert engine.scheduler.counters.num_preemptions == 0
        assert set(rows(engine.step())) == {0, 1}
        assert engine.scheduler.counters.num_preemptions == 1
        engine.run()

    def test_their_own_parent_is_not_displaced_for_them_either(self) -> None:
        engine = MiniEngine(max_num_seqs=1)
        engine.add(parent := make_sequence(0, priority=2), make_fork(1, parent, priority=0))
        engine.run()
        assert engine.finished == [0, 1]
        assert engine.scheduler.counters.num_preemptions == 0

    def test_they_keep_their_place(self) -> None:
        engine = self.make_deferred(max_num_seqs=2)
        engine.add(make_sequence(3, prompt=4, new=4), *(make_sequence(n, new=1) for n in range(4, 8)))
        engine.run()
        assert engine.finished[0] == 3
        assert engine.finished.index(SequenceId(1)) < engine.finished.index(SequenceId(4))

    def test_those_that_find_no_slot_wait_for_one_as_others_do(self) -> None:
        engine = MiniEngine(max_num_seqs=2, block_size=4)
        engine.add(*make_family(prompt=7, new=3, siblings=6), *(make_sequence(n, new=3) for n in (6, 7)))
        engine.run()
        assert engine.finished[-1] == 7
        assert sorted(engine.finished) == list(range(8))

    def test_one_may_be_aborted_meanwhile(self) -> None:
        engine = self.make_deferred()
        engine.step()
        engine.abort(SequenceId(1))
        assert engine.scheduler.num_waiting == 1
        engine.abort(SequenceId(2))
        assert engine.scheduler.num_waiting == 0
        engine.run()

    def test_a_whole_family_waits_for_its_turn(self) -> None:
        engine = MiniEngine(max_num_seqs=1)
        engine.add(make_sequence(9, new=3), *make_family(siblings=3))
        engine.step()
        assert engine.scheduler.num_waiting == 3
        engine.run()
        assert engine.finished == [9, 0, 1, 2]
