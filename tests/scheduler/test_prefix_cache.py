"""What is reused of earlier computation, and what is not."""

from typing import Any

import pytest

from tests.scheduler.factories import MiniEngine, make_scheduler, make_sequence, make_tokens, rows, step
from tidemill_scheduler import SequenceId


class TestPrefixCache:
    def add_twice(self, prompt: int, *, new: int = 1, **changes: Any) -> MiniEngine:
        engine = MiniEngine(**changes)
        engine.add(make_sequence(0, prompt=make_tokens(prompt), new=new))
        engine.run()
        engine.add(make_sequence(1, prompt=make_tokens(prompt), new=new))
        engine.run()
        return engine

    @pytest.mark.parametrize(("prompt", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
    def test_covers_full_blocks_and_never_the_last_token(self, prompt: int, hit: int) -> None:
        engine = self.add_twice(prompt, block_size=4)
        assert engine.rows_of(1) == [(hit, prompt - hit)]
        assert engine.sequences[SequenceId(1)].num_cached_tokens == hit
        assert engine.scheduler.counters.num_prefix_query_tokens == 2 * prompt
        assert engine.scheduler.counters.num_prefix_hit_tokens == hit

    def test_generated_tokens_are_found_too(self) -> None:
        engine = MiniEngine(block_size=4)
        engine.add(first := make_sequence(0, prompt=4, new=9))
        engine.run()
        engine.add(make_sequence(1, prompt=[*first.token_ids, 5, 6], new=1))
        engine.run()
        assert engine.rows_of(1) == [(12, 3)]

    def test_blocks_are_shared_while_both_run(self) -> None:
        engine = MiniEngine(block_size=4)
        engine.add(make_sequence(0, prompt=make_tokens(9), new=5))
        engine.step()
        engine.add(make_sequence(1, prompt=make_tokens(9), new=5))
        first, second = engine.step().rows
        assert first.block_tables[0][:2] == second.block_tables[0][:2]
        engine.run()

    def test_a_block_is_found_only_when_its_content_exists(self) -> None:
        engine = MiniEngine(block_size=4, in_flight=2)
        engine.add(make_sequence(0, prompt=make_tokens(9)))
        engine.schedule()
        engine.add(make_sequence(1, prompt=make_tokens(9)))
        engine.schedule()
        assert engine.rows_of(1) == []
        engine.land()
        engine.schedule()
        assert engine.rows_of(1) == [(8, 1)]
        engine.run()

    def test_other_salts_share_nothing(self) -> None:
        engine = MiniEngine()
        engine.add(make_sequence(0, prompt=make_tokens(20), salt=b"a"))
        engine.run()
        engine.add(make_sequence(1, prompt=make_tokens(20), salt=b"b"))
        engine.run()
        assert engine.scheduler.counters.num_prefix_hit_tokens == 0

    def test_switched_off_nothing_is_shared_nor_counted(self) -> None:
        engine = self.add_twice(20, enable_prefix_caching=False)
        assert engine.rows_of(1)[0] == (0, 20)
        assert (
            engine.scheduler.counters.num_prefix_query_tokens
            == engine.scheduler.counters.num_prefix_hit_tokens
            == 0
        )

    def test_switched_off_not_even_by_a_later_sequence_of_the_same_id(self) -> None:
        scheduler = make_scheduler(enable_prefix_caching=False)
        for _ in range(2):
            scheduler.add(make_sequence(0, prompt=20, new=1))
            assert rows(step(scheduler)) == {0: (0, 20, True)}
            scheduler.finish(SequenceId(0))

    @pytest.mark.parametrize("caching", [True, False])
    def test_a_preempted_sequence_finds_its_own_blocks(self, caching: bool) -> None:
        engine = MiniEngine(block_size=4, enable_prefix_caching=caching)
        engine.add(make_sequence(0, prompt=10, new=4))
        engine.step()
        engine.scheduler.preempt(SequenceId(0))
        engine.run()
        assert engine.rows_of(0) == [(0, 10), (8, 3), (11, 1), (12, 1)]
        assert engine.scheduler.counters.num_recomputed_tokens == 2
