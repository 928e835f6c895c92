"""`check_integrity` finds what it is there for."""

import pytest

from tests.scheduler.factories import MiniEngine, make_sequence
from tidemill_scheduler import IntegrityError, SequenceId


class TestIntegrity:
    def make_running(self) -> MiniEngine:
        engine = MiniEngine(block_size=4)
        engine.add(make_sequence(0, prompt=6), make_sequence(1, prompt=6))
        engine.schedule()
        return engine

    def test_a_shared_block_that_is_not_full_is_found(self) -> None:
        engine = self.make_running()
        first, second = (engine.sequences[SequenceId(number)] for number in (0, 1))
        pool = engine.scheduler._pool
        pool.free(second.block_table[1:], last_step=None)
        pool.acquire(first.block_table[1:])
        engine.scheduler._set_table(second, [second.block_table[0], first.block_table[1]])
        with pytest.raises(IntegrityError, match="not full yet"):
            engine.scheduler.check_integrity()

    def test_a_free_block_that_a_plan_names_is_found(self) -> None:
        engine = self.make_running()
        engine.scheduler.finish(SequenceId(0))
        engine.scheduler._pool.release(0)
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
