"""Faults that other schedulers had, each as the situation in which it showed."""

from itertools import pairwise
from random import Random

import pytest

from tests.scheduler.factories import MiniEngine, make_sequence, make_tokens
from tidemill_scheduler import NeverFits, SequenceId


def test_a_prompt_longer_than_the_budget_progresses_among_decodes_in_small_memory() -> None:
    """vllm#25538: it was resumed, starved and preempted again in every step."""
    engine = MiniEngine(num_blocks=20, block_size=4, max_num_batched_tokens=8, max_prefill_chunk=6)
    engine.add(*(make_sequence(number, prompt=6, new=30) for number in range(3)))
    engine.add(long := make_sequence(3, prompt=40, new=4))
    engine.run()
    starts = [start for start, _ in engine.rows_of(3)]
    assert long.num_preemptions <= 3
    restarts = sum(after < before for before, after in pairwise(starts))
    assert restarts <= long.num_preemptions
    assert len(engine.history) < 100


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_preempted_sequence_keeps_its_place(in_flight: int) -> None:
    """vllm#41951: it queued up again behind those that had come later."""
    engine = MiniEngine(max_num_seqs=1, in_flight=in_flight)
    engine.add(make_sequence(0, new=3), make_sequence(1, new=3))
    engine.step()
    engine.scheduler.preempt(SequenceId(0))
    engine.add(make_sequence(2, new=3))
    engine.run()
    assert engine.finished == [0, 1, 2]


@pytest.mark.parametrize("returned", range(6))
def test_preemption_between_launch_and_return_loses_no_count_and_no_token(returned: int) -> None:
    """vllm#48245, vllm#47900, vllm#28787: chunks in flight, then a preemption."""
    engine = MiniEngine(in_flight=2, max_num_batched_tokens=8, block_size=4)
    engine.add(sequence := make_sequence(0, prompt=20, new=6))
    for _ in range(returned):
        engine.step()
    engine.schedule()
    engine.scheduler.preempt(sequence.id)
    engine.run()
    assert engine.finished == [0]


def test_hundreds_preempted_and_found_again_in_the_prefix_cache() -> None:
    """nano-vllm#211, nano-vllm#233: stale counts of scheduled tokens."""
    engine = MiniEngine(num_blocks=120, block_size=4, max_num_seqs=64, max_num_batched_tokens=256)
    random = Random(0)
    for number in range(256):
        prompt = make_tokens(random.randint(4, 24), first=1000 * random.randint(0, 3))
        engine.add(make_sequence(number, prompt=prompt, new=random.randint(1, 20)))
    engine.run()
    assert len(engine.finished) == 256
    assert engine.scheduler.counters.num_preemptions > 10


@pytest.mark.parametrize("tokens", [3, 4, 5])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_at_block_size_plus_one(tokens: int, caching: bool) -> None:
    """nano-vllm#217: an assertion fell at exactly block_size + 1 tokens."""
    engine = MiniEngine(block_size=4, enable_prefix_caching=caching)
    engine.add(sequence := make_sequence(0, prompt=3, new=6))
    while len(sequence.token_ids) < tokens:
        engine.step()
    engine.scheduler.preempt(sequence.id)
    engine.run()
    assert engine.finished == [0]


def test_the_only_sequence_may_use_all_memory() -> None:
    """sglang#14948, sglang#19881: the sole running request ran out of memory and took the server down."""
    engine = MiniEngine(num_blocks=5, block_size=4)
    engine.add(make_sequence(0, prompt=5, new=16))
    engine.run()
    assert engine.finished == [0]
    assert engine.scheduler.counters.num_preemptions == 0
    with pytest.raises(NeverFits):
        engine.add(make_sequence(1, prompt=5, new=17))


def test_one_that_never_fits_is_refused_alone() -> None:
    """vllm#39734: it waited for ever and blocked all behind it."""
    engine = MiniEngine(num_blocks=8, block_size=4)
    for number in range(6):
        if number == 2:
            with pytest.raises(NeverFits):
                engine.add(make_sequence(number, prompt=40, new=1))
        else:
            engine.add(make_sequence(number))
    engine.run()
    assert sorted(engine.finished) == [0, 1, 3, 4, 5]


def test_memory_is_counted_in_blocks_not_in_tokens() -> None:
    """sglang#6731: a victim's 9 tokens are 3 blocks; the 5 of another's are 2."""
    engine = MiniEngine(num_blocks=5, block_size=4)
    engine.add(make_sequence(0, prompt=12, new=8), make_sequence(1, prompt=5, new=5))
    engine.run()
    assert engine.sequences[SequenceId(1)].num_preemptions == 1
    assert engine.sequences[SequenceId(0)].num_preemptions == 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_memory_returns_to_where_it_was(in_flight: int) -> None:
    """sglang#6778: finished requests kept theirs until nothing fitted."""
    engine = MiniEngine(num_blocks=16, in_flight=in_flight)
    for round_ in range(5):
        for number in range(8 * round_, 8 * round_ + 8):
            engine.add(make_sequence(number, prompt=9, new=9))
        engine.step()
        engine.abort(SequenceId(8 * round_ + 1))
        engine.run()
        assert engine.scheduler._memory.pool.num_free == 16


def test_a_decode_is_never_left_out_for_prompts_that_keep_coming() -> None:
    """FreeToken#483, local-inference-lab/vllm#541: prefills froze every decode for a whole burst."""
    engine = MiniEngine(num_blocks=200, max_num_batched_tokens=16, max_prefill_chunk=8)
    engine.add(make_sequence(0, prompt=4, new=60))
    engine.step()
    for number in range(1, 60):
        engine.add(make_sequence(number, prompt=30, new=1))
        plan = engine.step()
        shares = {row.sequence: row.count for row in plan.rows}
        assert shares[SequenceId(0)] == 1
        assert max(shares.values()) <= 8


def test_recomputed_tokens_are_no_prefix_hits() -> None:
    """vllm#25780: on random data a third of the tokens counted as hits."""
    engine = MiniEngine(num_blocks=12, block_size=4)
    engine.add(*(make_sequence(number, prompt=8, new=12) for number in range(6)))
    engine.run()
    assert engine.scheduler.counters.num_preemptions > 0
    assert engine.scheduler.counters.num_recomputed_tokens > 0
    assert engine.scheduler.counters.num_prefix_hit_tokens == 0
    assert engine.scheduler.counters.num_prefix_query_tokens == 6 * 8
    assert all(sequence.num_cached_tokens == 0 for sequence in engine.sequences.values())


def test_recomputed_tokens_are_those_computed_twice() -> None:
    """vllm#54644 is measured by this count: rows less what an undisturbed run would compute."""
    engine = MiniEngine(num_blocks=12, block_size=4, in_flight=2)
    engine.add(*(make_sequence(number, prompt=8, new=12) for number in range(6)))
    engine.run()
    computed = sum(plan.num_tokens for plan in engine.history)
    assert computed - 6 * (8 + 11) == engine.scheduler.counters.num_recomputed_tokens > 0


def test_aborted_between_its_last_chunk_and_the_return_it_emits_nothing() -> None:
    """sglang#34149: it emitted one token."""
    engine = MiniEngine(max_num_batched_tokens=8)
    engine.add(sequence := make_sequence(0, prompt=16))
    engine.step()
    assert engine.schedule().rows[0].sample
    engine.abort(sequence.id)
    assert engine.land() == []
    assert sequence.num_output_tokens == 0


def test_a_very_long_prompt_is_found_in_the_cache_and_still_answers() -> None:
    """openvino.genai#4047: with prefix caching a prompt of 55,000 tokens gave none at all."""
    scheduler_limits = {"num_blocks": 4000, "block_size": 16, "max_model_len": 60000}
    engine = MiniEngine(**scheduler_limits, max_num_batched_tokens=60000)
    engine.check = lambda: None  # type: ignore[method-assign]  # too slow at this size
    for number in range(2):
        engine.add(make_sequence(number, prompt=make_tokens(55_000), new=2))
        engine.run()
    assert engine.rows_of(0)[0] == (0, 55_000)
    assert engine.rows_of(1)[0] == (54_992, 8)
    assert engine.finished == [0, 1]


def test_parked_and_blocked_sequences_do_not_stall_each_other() -> None:
    """vllm#45388, vllm#45414: nothing ran, everything waited, memory was empty."""
    engine = MiniEngine(num_blocks=6, block_size=4, in_flight=2)
    engine.add(*(make_sequence(number, prompt=15, new=10, priority=number % 3) for number in range(9)))
    engine.run()
    assert len(engine.finished) == 9
