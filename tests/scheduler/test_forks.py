"""Siblings that share one computation of their prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.factories import (
    MiniEngine,
    make_decoding,
    make_family,
    make_fork,
    make_scheduler,
    make_sequence,
    make_tokens,
    rows,
    step,
)
from tidemill_scheduler import BlockCopy, DuplicateSequence, SequenceId

PROMPTS = [1, 2, 4, 5, 6, 8, 9, 11]


class TestSharing:
    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_the_prompt_is_computed_once_and_its_last_token_by_each(
        self, prompt: int, caching: bool, in_flight: int
    ) -> None:
        engine = MiniEngine(block_size=4, enable_prefix_caching=caching, in_flight=in_flight)
        engine.add(*make_family(prompt=prompt, new=6, siblings=5))
        engine.run()
        assert engine.num_prompt_tokens_computed == prompt + 4
        assert [engine.rows_of(number)[0] for number in range(1, 5)] == [(prompt - 1, 1)] * 4
        assert [sequence.num_cached_tokens for sequence in engine.sequences.values()] == [
            0,
            *[prompt - 1] * 4,
        ]
        assert engine.scheduler.counters.num_preemptions == 0

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_also_over_several_chunks(self, in_flight: int) -> None:
        engine = MiniEngine(
            in_flight=in_flight, max_num_batched_tokens=10, max_num_seqs=6, max_prefill_chunk=7
        )
        engine.add(*make_family(prompt=30, new=3, siblings=5))
        engine.run()
        assert engine.num_prompt_tokens_computed == 30 + 4

    @pytest.mark.parametrize("caching", [True, False])
    def test_full_blocks_are_shared_and_the_partly_filled_one_is_copied_in_the_same_plan(
        self, caching: bool
    ) -> None:
        engine = MiniEngine(block_size=4, enable_prefix_caching=caching)
        engine.add(*make_family(prompt=7, siblings=3))
        engine.step()
        plan = engine.step()
        parent, *forks = (row.block_tables[0] for row in plan.rows)
        assert [fork[0] for fork in forks] == [parent[0]] * 2
        assert len({parent[1], *(fork[1] for fork in forks)}) == 3
        assert plan.block_copies == tuple(BlockCopy(parent[1], fork[1]) for fork in forks)
        assert engine.step().block_copies == ()

    @pytest.mark.parametrize("prompt", [1, 5, 9])
    def test_nothing_is_copied_if_the_last_token_begins_a_block(self, prompt: int) -> None:
        engine = MiniEngine(block_size=4)
        engine.add(*make_family(prompt=prompt, siblings=3))
        engine.run()
        assert all(plan.block_copies == () for plan in engine.history)

    def test_they_wait_for_the_step_after_the_one_that_computes_the_prompt(self) -> None:
        engine = MiniEngine(block_size=4)
        engine.add(*make_family(prompt=7, siblings=3))
        assert rows(engine.step()) == {0: (0, 7, True)}
        assert rows(engine.step()) == {0: (7, 1, True), 1: (6, 1, True), 2: (6, 1, True)}

    def test_which_need_not_have_returned(self) -> None:
        engine = MiniEngine(block_size=4, in_flight=2)
        engine.add(*make_family(prompt=7, siblings=3))
        engine.schedule()
        assert rows(engine.schedule()) == {0: (7, 1, True), 1: (6, 1, True), 2: (6, 1, True)}
        engine.run()

    def test_a_prompt_of_one_token_is_waited_for_by_nobody(self) -> None:
        engine = MiniEngine()
        engine.add(*make_family(prompt=1, siblings=3))
        assert rows(engine.step()) == {number: (0, 1, True) for number in range(3)}

    @pytest.mark.parametrize("prompt", PROMPTS)
    @pytest.mark.parametrize("steps", [1, 2, 3, 5])
    def test_one_that_comes_while_the_parent_decodes(self, steps: int, prompt: int) -> None:
        engine, parent = make_decoding(prompt=prompt, steps=steps)
        engine.add(make_fork(1, parent))
        assert rows(engine.step())[1] == (prompt - 1, 1, True)
        engine.run()

    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("generated", [1, 2, 5])
    def test_a_resumed_one_computes_its_own_tokens_too(self, generated: int, caching: bool) -> None:
        engine, parent = make_decoding(enable_prefix_caching=caching)
        engine.add(make_fork(1, parent, generated=make_tokens(generated)))
        assert rows(engine.step())[1] == (6, 1 + generated, True)
        engine.run()

    def test_the_parent_may_be_resumed(self) -> None:
        engine = MiniEngine(block_size=4, max_num_batched_tokens=10, max_prefill_chunk=8)
        engine.add(parent := make_sequence(0, prompt=20, num_prompt_tokens=7), make_fork(1, parent))
        engine.step()
        assert rows(engine.step()) == {1: (6, 1, True), 0: (10, 8, False)}
        engine.run()

    def test_the_parent_may_have_found_its_prompt_in_the_cache(self) -> None:
        engine = MiniEngine(block_size=4)
        engine.add(make_sequence(9, prompt=make_tokens(8), new=1))
        engine.run()
        engine.add(*make_family(prompt=make_tokens(11), siblings=3))
        assert rows(engine.step()) == {0: (8, 3, True)}
        assert rows(engine.step())[2] == (10, 1, True)
        engine.run()
        assert [engine.sequences[SequenceId(number)].num_cached_tokens for number in range(3)] == [8, 10, 10]

    def test_all_of_it_even_so_that_its_siblings_start_with_it(self) -> None:
        engine = MiniEngine(block_size=4)
        engine.add(make_sequence(9, prompt=make_tokens(8), new=1))
        engine.run()
        engine.add(*make_family(prompt=make_tokens(9), siblings=3))
        assert rows(engine.step()) == {number: (8, 1, True) for number in range(3)}
        engine.run()

    def test_a_fork_may_be_forked(self) -> None:
        engine, parent = make_decoding()
        engine.add(child := make_fork(1, parent), grandchild := make_fork(2, child))
        plan = engine.step()
        assert rows(plan) == {0: (8, 1, True), 1: (6, 1, True), 2: (6, 1, True)}
        assert {copy.source for copy in plan.block_copies} == {parent.block_table[1]}
        assert grandchild.block_table[0] == parent.block_table[0]
        engine.run()

    def test_the_longer_one_of_a_shared_and_a_cached_beginning_counts(self) -> None:
        engine, parent = make_decoding(steps=1)
        engine.add(fork := make_fork(1, parent, new=12))
        while fork.num_computed_tokens < 13:
            engine.step()
        engine.scheduler.preempt(fork.id)
        assert rows(engine.step())[1][0] == 12
        engine.run()

    def test_a_preempted_fork_forks_again(self) -> None:
        engine, parent = make_decoding(steps=1)
        engine.add(fork := make_fork(1, parent))
        engine.step()
        engine.scheduler.preempt(fork.id)
        plan = engine.step()
        assert rows(plan)[1] == (6, 2, True)
        assert len(plan.block_copies) == 1
        engine.run()

    def test_hashes_of_the_prompt_are_taken_over(self) -> None:
        engine, parent = make_decoding(prompt=11)
        engine.add(fork := make_fork(1, parent))
        engine.step()
        assert all(
            mine is theirs for mine, theirs in zip(fork.block_hashes[:2], parent.block_hashes, strict=False)
        )

    def test_memory_is_that_of_one_prompt_and_as_many_ends(self) -> None:
        engine = MiniEngine(block_size=4, num_blocks=32, enable_prefix_caching=False)
        engine.add(*make_family(prompt=27, new=2, siblings=6))
        engine.step()
        engine.schedule()
        assert engine.scheduler.kv_usage == pytest.approx((6 + 6) / 32)
        engine.run()


class TestCounters:
    def test_a_fork_asks_nothing_of_the_prefix_cache(self) -> None:
        engine = MiniEngine(block_size=4)
        engine.add(*make_family(prompt=11, siblings=3))
        engine.run()
        counters = engine.scheduler.counters
        assert (counters.num_prefix_query_tokens, counters.num_prefix_hit_tokens) == (11, 0)

    def test_one_without_a_parent_does(self) -> None:
        engine = MiniEngine(block_size=4)
        engine.add(parent := make_sequence(0, prompt=11, new=1))
        engine.run()
        engine.add(fork := make_fork(1, parent, new=1))
        engine.run()
        counters = engine.scheduler.counters
        assert (counters.num_prefix_query_tokens, counters.num_prefix_hit_tokens) == (22, 8)
        assert fork.num_cached_tokens == 8


class TestWithoutParent:
    @pytest.mark.parametrize("caching", [True, False])
    def test_a_parent_of_one_token_is_gone_but_its_full_blocks_are_found(self, caching: bool) -> None:
        engine = MiniEngine(block_size=4, enable_prefix_caching=caching)
        engine.add(*make_family(prompt=11, new=1, siblings=4))
        engine.run()
        assert [engine.rows_of(number) for number in range(4)] == [[(0, 11)], *[[(8, 3)]] * 3]
        assert engine.sequences[SequenceId(3)].num_cached_tokens == 8

    def test_unless_its_end_is_still_in_flight(self) -> None:
        engine = MiniEngine(block_size=4, in_flight=2)
        engine.add(*make_family(prompt=11, new=1, siblings=4))
        engine.run()
        assert engine.num_prompt_tokens_computed == 11 + 3

    def test_one_that_was_never_here_is_not_waited_for(self) -> None:
        engine = MiniEngine()
        engine.add(make_fork(1, make_sequence(0)))
        assert rows(engine.step()) == {1: (0, 8, True)}
        engine.run()

    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("steps", range(5))
    def test_it_may_be_aborted_at_any_time(self, steps: int, caching: bool) -> None:
        engine = MiniEngine(
            max_num_batched_tokens=8, max_prefill_chunk=5, in_flight=2, enable_prefix_caching=caching
        )
        engine.add(*make_family(prompt=14, siblings=3))
        for _ in range(steps):
            engine.step()
        engine.abort(SequenceId(0))
        engine.run()
        assert sorted(engine.finished) == [0, 1, 2]

    def test_a_later_one_of_its_id_is_another(self) -> None:
        engine = MiniEngine(max_num_seqs=1)
        engine.add(*make_family(prompt=8, new=1, siblings=2))
        engine.step()
        engine.scheduler.add(make_sequence(0, prompt=make_tokens(20, first=9000)))
        engine.scheduler.finish(SequenceId(0))
        engine.run()
        assert sorted(engine.finished) == [0, 1]

    @pytest.mark.parametrize("caching", [True, False])
    def test_its_blocks_are_still_found_after_its_end(self, caching: bool) -> None:
        """Siblings are one family also where caching between strangers is off."""
        engine, parent = make_decoding(prompt=11, steps=1, enable_prefix_caching=caching)
        engine.add(fork := make_fork(1, parent))
        engine.step()
        engine.abort(parent.id)
        engine.scheduler.preempt(fork.id)
        assert rows(engine.step()) == {1: (8, 4, True)}
        engine.run()

    def test_a_block_that_was_full_but_for_the_prompt_is_found_too(self) -> None:
        engine = MiniEngine(block_size=4, enable_prefix_caching=False)
        engine.add(parent := make_sequence(0, prompt=4, new=1))
        engine.add(make_fork(1, parent, generated=[7], new=1))
        engine.run()
        assert engine.rows_of(1) == [(4, 1)]

    def test_its_siblings_make_its_blocks_known_if_it_ends_before_it_can(self) -> None:
        engine = MiniEngine(block_size=4, in_flight=2)
        engine.add(*make_family(prompt=make_tokens(9), siblings=2))
        engine.schedule()
        engine.schedule()
        engine.abort(SequenceId(0))
        engine.land()
        engine.land()
        engine.add(make_sequence(2, prompt=make_tokens(9)))
        assert rows(engine.schedule())[2] == (8, 1, True)
        engine.run()


class TestRefusal:
    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"token_ids": make_tokens(8, first=5)}, "another prompt"),
            ({"token_ids": make_tokens(7), "num_prompt_tokens": 7}, "another prompt"),
            ({"num_prompt_tokens": 7}, "another prompt"),
            ({"salt": b"tenant"}, "another salt"),
        ],
    )
    def test_of_what_is_no_sibling(self, changes: dict[str, Any], why: str) -> None:
        scheduler = make_scheduler()
        scheduler.add(parent := make_sequence(0, prompt=make_tokens(8)))
        with pytest.raises(ValueError, match=f"sequence 1 forks from 0, which has {why}"):
            scheduler.add(make_fork(1, parent, **changes))
        assert scheduler.num_waiting == 1
        scheduler.add(make_fork(1, parent))
        step(scheduler)

    def test_a_second_one_of_the_same_id(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(parent := make_sequence(0))
        scheduler.add(make_fork(1, parent))
        with pytest.raises(DuplicateSequence):
            scheduler.add(make_fork(1, parent))
        scheduler.finish(SequenceId(1))
        scheduler.add(make_fork(1, parent))
        assert scheduler.num_waiting == 2
        scheduler.check_integrity()

    def test_of_one_that_would_compute_its_prompt_all_the_same(self) -> None:
        with pytest.raises(ValueError, match="sequence 1 cannot share its prompt and compute it"):
            make_fork(1, make_sequence(0), compute_prompt=True)
