"""`check_integrity` finds what it is there for."""

from dataclasses import replace

import pytest

from tests.scheduler.factories import MiniEngine, make_fork, make_sequence
from tidemill_scheduler import BlockCopy, IntegrityError, Sequence, SequenceId


class TestIntegrity:
    def make_running(self) -> MiniEngine:
        engine = MiniEngine(block_size=4)
        engine.add(make_sequence(0, prompt=6), make_sequence(1, prompt=6))
        engine.schedule()
        return engine

    def test_a_shared_block_that_is_not_full_is_found(self) -> None:
        engine = self.make_running()
        first, second = (engine.sequences[SequenceId(number)] for number in (0, 1))
        pool = engine.scheduler._memory.pool
        pool.free(second.block_table[1:], last_step=None)
        pool.acquire(first.block_table[1:])
        engine.scheduler._memory._set_table(second, [second.block_table[0], first.block_table[1]])
        with pytest.raises(IntegrityError, match="not full yet"):
            engine.scheduler.check_integrity()

    def test_a_block_shared_by_different_texts_is_found(self) -> None:
        engine = self.make_running()
        first, second = (engine.sequences[SequenceId(number)] for number in (0, 1))
        pool = engine.scheduler._memory.pool
        pool.free(second.block_table[:1], last_step=None)
        pool.acquire(first.block_table[:1])
        engine.scheduler._memory._set_table(second, [first.block_table[0], second.block_table[1]])
        with pytest.raises(IntegrityError, match="shared by different texts"):
            engine.scheduler.check_integrity()

    def test_a_free_block_that_a_plan_names_is_found(self) -> None:
        engine = self.make_running()
        engine.scheduler.finish(SequenceId(0))
        engine.scheduler._memory.pool.release(0)
        with pytest.raises(IntegrityError, match="is free, step 0 names it"):
            engine.scheduler.check_integrity()

    def test_a_lost_sequence_is_found(self) -> None:
        engine = self.make_running()
        engine.scheduler._sequences.pop(SequenceId(1))
        with pytest.raises(IntegrityError, match="not all sequences"):
            engine.scheduler.check_integrity()

    def test_a_wrong_count_of_computed_tokens_is_found(self) -> None:
        engine = self.make_running()
        engine.sequences[SequenceId(1)].num_computed_tokens = 9
        with pytest.raises(IntegrityError, match="sequence 1: computed 9 tokens into room for 8"):
            engine.scheduler.check_integrity()


class TestCopies:
    def make_copying(self) -> tuple[MiniEngine, BlockCopy]:
        """A plan in flight that copies from sequence 0 to its fork, 1, beside sequence 2."""
        engine = MiniEngine(block_size=4, num_blocks=8)
        engine.add(parent := make_sequence(0, prompt=6), make_fork(1, parent), make_sequence(2, prompt=6))
        engine.step()
        (copy,) = engine.schedule().block_copies
        return engine, copy

    def test_a_free_source_is_found(self) -> None:
        engine, copy = self.make_copying()
        engine.scheduler.finish(SequenceId(0))
        engine.scheduler._memory.pool.release(1)
        assert engine.scheduler._memory.pool.is_free(copy.source)
        with pytest.raises(IntegrityError, match=f"block {copy.source} is free, step 1 names it"):
            engine.scheduler.check_integrity()

    def replace(self, engine: MiniEngine, copy: BlockCopy, *more: Sequence) -> None:
        """Let the plan in flight copy this, for the fork and for these."""
        flight = engine.scheduler._flights._flights.pop()
        plan = replace(flight.plan, block_copies=(copy, *flight.plan.block_copies[: len(more)]))
        forks = (engine.sequences[SequenceId(1)], *more)
        engine.scheduler._flights._flights.append(replace(flight, plan=plan, forks=forks))

    def test_a_source_that_another_sequence_writes_is_found(self) -> None:
        engine, copy = self.make_copying()
        others = engine.sequences[SequenceId(2)].block_table[1]
        self.replace(engine, replace(copy, source=others))
        with pytest.raises(IntegrityError, match=f"block {others}, copied for sequence 1, gets another text"):
            engine.scheduler.check_integrity()

    def test_a_target_that_another_sequence_writes_is_found(self) -> None:
        engine, copy = self.make_copying()
        others = engine.sequences[SequenceId(2)].block_table[1]
        self.replace(engine, replace(copy, target=others))
        with pytest.raises(IntegrityError, match=f"block {others} is written for two sequences"):
            engine.scheduler.check_integrity()

    def test_a_source_that_is_copied_over_is_found(self) -> None:
        engine, copy = self.make_copying()
        first = engine.sequences[SequenceId(0)].block_table[0]
        chained = replace(copy, source=copy.target, target=first)
        self.replace(engine, chained, engine.sequences[SequenceId(1)])
        with pytest.raises(IntegrityError, match=f"block {copy.target} is copied from and over in step 1"):
            engine.scheduler.check_integrity()
