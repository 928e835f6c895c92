"""Sequences that compute every position of their prompt themselves, as logprobs of the prompt need."""

from __future__ import annotations

import pytest

from tests.scheduler.factories import MiniEngine, make_fork, make_sequence, make_tokens, rows
from tidemill_scheduler import SequenceId


def make_cached(**changes: object) -> MiniEngine:
    """An engine whose prefix cache holds the 20 tokens that the tests here begin with."""
    engine = MiniEngine(block_size=4, **changes)
    engine.add(make_sequence(9, prompt=make_tokens(21), new=1))
    engine.run()
    return engine


class TestComputePrompt:
    @pytest.mark.parametrize("prompt", [1, 4, 5, 20])
    def test_takes_nothing_from_the_prefix_cache(self, prompt: int) -> None:
        engine = make_cached()
        engine.add(sequence := make_sequence(0, prompt=make_tokens(prompt), new=3, compute_prompt=True))
        engine.run()
        assert engine.rows_of(0)[0] == (0, prompt)
        assert sequence.num_cached_tokens == 0

    def test_asks_nothing_of_it(self) -> None:
        engine = make_cached()
        engine.add(make_sequence(0, prompt=make_tokens(20), compute_prompt=True))
        engine.run()
        counters = engine.scheduler.counters
        assert (counters.num_prefix_query_tokens, counters.num_prefix_hit_tokens) == (21, 0)

    def test_but_leaves_its_blocks_to_others(self) -> None:
        engine = MiniEngine(block_size=4)
        engine.add(make_sequence(0, prompt=make_tokens(10), new=1, compute_prompt=True))
        engine.run()
        engine.add(make_sequence(1, prompt=make_tokens(10), new=1))
        engine.run()
        assert engine.rows_of(1) == [(8, 2)]

    @pytest.mark.parametrize("caching", [True, False])
    def test_a_preempted_one_finds_what_it_has_computed_and_no_more(self, caching: bool) -> None:
        engine = make_cached(max_num_batched_tokens=10, max_prefill_chunk=9, enable_prefix_caching=caching)
        engine.add(make_sequence(0, prompt=make_tokens(20), new=3, compute_prompt=True))
        engine.step()
        engine.scheduler.preempt(SequenceId(0))
        engine.run()
        assert engine.rows_of(0)[:2] == [(0, 10), (8, 10)]  # two blocks, though the cache may know five

    @pytest.mark.parametrize("steps", range(1, 8))
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_every_position_is_computed_wherever_it_is_preempted(self, steps: int, in_flight: int) -> None:
        engine = make_cached(max_num_batched_tokens=8, max_prefill_chunk=3, in_flight=in_flight)
        engine.add(
            sequence := make_sequence(0, prompt=make_tokens(20), new=3, compute_prompt=True),
            make_sequence(1, prompt=6, new=8),
        )
        for _ in range(steps):
            engine.step()
        engine.scheduler.preempt(SequenceId(0))
        engine.run()
        assert engine.uncomputed_of(sequence) == set()

    def test_a_resumed_one_computes_its_prompt_too(self) -> None:
        engine = make_cached()
        engine.add(make_sequence(0, prompt=make_tokens(18), num_prompt_tokens=10, compute_prompt=True))
        engine.run()
        assert engine.rows_of(0)[0] == (0, 18)

    def test_its_siblings_share_what_it_computes(self) -> None:
        engine = make_cached()
        engine.add(parent := make_sequence(0, prompt=make_tokens(19), compute_prompt=True))
        engine.add(make_fork(1, parent), make_fork(2, parent))
        assert rows(engine.step()) == {0: (0, 19, True)}
        assert rows(engine.step()) == {0: (19, 1, True), 1: (18, 1, True), 2: (18, 1, True)}
        engine.run()
