"""Faults of preemption, swapping and admission in other schedulers, each as it showed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.scheduler.factories import MiniEngine, make_hungry, make_sequence, make_tokens, rows
from tidemill_scheduler import NeverFits, PreemptionMode, SequenceId

WAYS = [
    pytest.param({"num_swap_blocks": 60, "preemption_mode": PreemptionMode.SWAP}, id="swap"),
    pytest.param({"num_swap_blocks": 3, "preemption_mode": PreemptionMode.SWAP}, id="little swap space"),
    pytest.param({"preemption_mode": PreemptionMode.RECOMPUTE}, id="recompute"),
]
"""What becomes of the blocks of those who are preempted."""


@pytest.mark.parametrize("way", WAYS)
def test_a_long_prompt_among_decodes_loses_nothing_that_it_need_not(way: dict[str, Any]) -> None:
    """vllm#25538: each step resumed it, starved it and preempted it again.

    Here whatever it computes is more than before, but after one of its few preemptions.
    """
    engine = MiniEngine(num_blocks=18, block_size=4, max_num_batched_tokens=8, max_prefill_chunk=6, **way)
    engine.add(*(make_sequence(number, prompt=6, new=30) for number in range(3)))
    engine.add(long := make_sequence(3, prompt=40, new=4, priority=2))
    engine.run()
    ends = [start + count for start, count in engine.rows_of(3)]
    assert sum(after <= before for before, after in pairwise(ends)) <= long.num_preemptions <= 3
    assert len(engine.history) < 120


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_preempted_one_keeps_its_place_under_priority(in_flight: int, way: dict[str, Any]) -> None:
    """vllm#41951: it queued up again behind those of its own priority that had come later."""
    engine = MiniEngine(num_blocks=10, block_size=4, max_num_seqs=2, in_flight=in_flight, **way)
    engine.add(*(make_sequence(number, prompt=9, new=5, priority=2) for number in range(3)))
    engine.step()
    engine.add(make_hungry(50, engine))
    engine.add(*(make_sequence(number, prompt=9, new=5, priority=2) for number in range(3, 6)))
    engine.run()
    assert engine.sequences[SequenceId(0)].num_preemptions == 1
    assert engine.finished == [50, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", range(1, 10))
def test_swapped_between_launch_and_return_it_loses_no_count_and_no_token(
    steps: int, way: dict[str, Any]
) -> None:
    """vllm#48245, vllm#47900, vllm#28787: a chunk or token in flight when it was driven out."""
    engine = MiniEngine(num_blocks=8, block_size=4, in_flight=2, max_num_batched_tokens=8, **way)
    engine.add(sequence := make_sequence(0, prompt=20, new=9))
    for _ in range(steps):
        engine.step()
    assert len(engine.plans) == 1
    engine.add(make_hungry(1, engine))
    engine.run()
    assert sequence.num_preemptions == 1
    assert sequence.num_output_tokens == 9
    engine.check_baseline()


@pytest.mark.parametrize("way", WAYS)
def test_a_victim_counts_in_blocks(way: dict[str, Any]) -> None:
    """sglang#6731: retraction counted tokens, and freed less than it thought, or more than it had to."""
    engine = MiniEngine(num_blocks=10, block_size=4, max_num_seqs=4, **way)
    engine.add(make_sequence(0, prompt=16, new=12))
    engine.add(*(make_sequence(number, prompt=5, new=3) for number in (1, 2)))
    engine.step()
    engine.step()
    assert engine.scheduler.counters.num_preemptions == 0
    engine.add(make_sequence(3, prompt=9, new=2, priority=0))  # three blocks; one is free
    engine.step()
    assert engine.scheduler.counters.num_preemptions == 1
    engine.run()
    assert len(engine.finished) == 4


@pytest.mark.parametrize("tokens", [4, 5, 8, 9])
@pytest.mark.parametrize("way", WAYS)
def test_swapped_at_a_block_and_one_more(tokens: int, way: dict[str, Any]) -> None:
    """nano-vllm#217: an assertion fell at exactly block_size + 1 tokens."""
    engine = MiniEngine(num_blocks=8, block_size=4, **way)
    engine.add(sequence := make_sequence(0, prompt=3, new=12))
    while len(sequence.token_ids) < tokens:
        engine.step()
    engine.add(make_hungry(1, engine))
    engine.run()
    assert sequence.num_preemptions == 1


@pytest.mark.parametrize("way", WAYS)
def test_hundreds_that_are_driven_out_and_find_their_prefix_again(way: dict[str, Any]) -> None:
    """nano-vllm#211, nano-vllm#233: stale counts of what was scheduled, at 256 to 512 requests."""
    engine = MiniEngine(num_blocks=64, block_size=4, max_num_seqs=32, max_num_batched_tokens=128, **way)
    for number in range(256):
        prompt = [*make_tokens(8, first=1000 * (number % 3)), *make_tokens(number % 7, first=9000)]
        engine.add(make_sequence(number, prompt=prompt, new=1 + number % 20, priority=number % 3))
    engine.run(max_steps=3000)
    assert len(engine.finished) == 256
    assert engine.scheduler.counters.num_preemptions > 20
    engine.check_baseline()


@pytest.mark.parametrize("num_swap_blocks", [1, 4, 16])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_swapping_never_brings_everything_to_a_halt(in_flight: int, num_swap_blocks: int) -> None:
    """vllm#546: two ran, 98 waited in the swap space, and nothing moved any more."""
    engine = MiniEngine(
        num_blocks=12,
        block_size=4,
        num_swap_blocks=num_swap_blocks,
        preemption_mode=PreemptionMode.SWAP,
        in_flight=in_flight,
    )
    engine.add(*(make_sequence(number, prompt=9, new=20) for number in range(100)))
    engine.run(max_steps=4000)
    assert engine.scheduler.counters.num_swap_preemptions > 10
    assert len(engine.finished) == 100
    engine.check_baseline()


def test_blocks_are_written_anew_only_in_a_plan_that_saves_them_first() -> None:
    """vllm#29870: they were given to others before their store had finished."""
    engine = MiniEngine(
        num_blocks=8, block_size=4, num_swap_blocks=40, preemption_mode=PreemptionMode.SWAP, in_flight=2
    )
    engine.add(*(make_sequence(number, prompt=7, new=10) for number in range(6)))
    engine.run()
    contents: dict[int, int] = {}  # the last plan that wrote a block, or saved it
    saved = 0
    for plan in engine.history:
        for copy in plan.swap_out:
            assert contents[copy.source] < plan.step_id
            saved += 1
        for row in plan.rows:
            for position in range(row.start, row.start + row.count):
                contents[row.block_tables[0][position // 4]] = plan.step_id
    assert saved > 3


@pytest.mark.parametrize("way", WAYS)
def test_one_that_never_fits_is_refused_though_there_is_swap_space(way: dict[str, Any]) -> None:
    """vllm#39734: within the model's context and larger than the KV memory, it waited for ever."""
    engine = MiniEngine(num_blocks=8, block_size=4, **way)
    with pytest.raises(NeverFits, match="kv_cache_tokens"):
        engine.add(make_sequence(0, prompt=30, new=4))
    engine.add(make_sequence(1, prompt=30, new=3))
    engine.run()
    assert engine.finished == [1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_those_who_are_parked_hold_nothing_that_the_first_needs(in_flight: int, way: dict[str, Any]) -> None:
    """vllm#45388, vllm#45414: parked loads held blocks that a blocked head needed; all waited, for good."""
    engine = MiniEngine(num_blocks=10, block_size=4, in_flight=in_flight, watermark=0.1, **way)
    engine.add(*(make_sequence(number, prompt=15, new=20, priority=number % 3) for number in range(9)))
    engine.run(max_steps=600)
    assert engine.scheduler.counters.num_preemptions > 0
    assert len(engine.finished) == 9
    engine.check_baseline()


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_those_who_ended_in_any_state_comes_back(way: dict[str, Any]) -> None:
    """sglang#6778: what finished requests kept added up to a deadlock."""
    engine = MiniEngine(num_blocks=12, block_size=4, in_flight=2, **way)
    for first in range(0, 60, 6):
        engine.add(*(make_sequence(first + number, prompt=9, new=9) for number in range(6)))
        for number in range(5):
            engine.step()
            if number == 2:
                engine.add(make_hungry(1000 + first, engine))
        engine.abort(SequenceId(first + 2))
        engine.abort(SequenceId(first + 5))
        engine.run()
        engine.check_baseline()


@pytest.mark.parametrize("way", WAYS)
def test_with_every_slot_taken_by_lower_ones_a_higher_one_runs_in_the_next_step(way: dict[str, Any]) -> None:
    """vllm#40004: it waited for one of them to end, though there was memory."""
    engine = MiniEngine(max_num_seqs=3, **way)
    engine.add(*(make_sequence(number, new=20, priority=2) for number in range(3)))
    engine.step()
    engine.add(make_sequence(3, priority=0, new=1))
    assert 3 in rows(engine.step())
    engine.run()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_with_all_memory_taken_by_lower_ones_a_higher_one_runs_as_soon(
    in_flight: int, way: dict[str, Any]
) -> None:
    """sglang#14872: that memory was full was noted after the decision to preempt, so there was none."""
    engine = MiniEngine(num_blocks=8, block_size=4, in_flight=in_flight, **way)
    engine.add(*(make_sequence(number, prompt=6, new=9, priority=2) for number in range(9)))
    engine.step()
    engine.add(high := make_sequence(50, prompt=6, new=1, priority=0))
    for _ in range(in_flight):
        engine.step()
    assert engine.rows_of(50) == [(0, 6)]
    assert engine.scheduler.counters.num_preemptions == 1
    engine.run()
    assert engine.finished[0] == high.id


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_gap_between_two_tokens_of_a_decode_stays_a_step_whatever_comes(
    in_flight: int, way: dict[str, Any]
) -> None:
    """FreeToken#483: prompts went first, and every decode stood still for a whole burst."""
    engine = MiniEngine(
        num_blocks=26,
        block_size=4,
        max_num_batched_tokens=16,
        max_prefill_chunk=8,
        in_flight=in_flight,
        **way,
    )
    engine.add(decode := make_sequence(0, prompt=4, new=50))
    engine.step()
    number = 0
    while decode.id not in engine.finished:
        number += 1
        engine.add(make_sequence(number, prompt=30, new=5))
        engine.step()
    steps = [
        plan.step_id
        for plan in engine.history
        if decode.id in {row.sequence for row in plan.rows if row.sample}
    ]
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) <= in_flight  # the block it lacks may have to come back with a plan in flight
    assert gaps.count(1) >= 45
    assert engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("way", WAYS)
def test_the_last_one_may_fill_all_memory_and_come_back_into_it(way: dict[str, Any]) -> None:
    """sglang#14948, sglang#19881: the sole running request took the server down."""
    engine = MiniEngine(num_blocks=6, block_size=4, **way)
    engine.add(last := make_sequence(0, prompt=9, new=16))
    while not last.is_complete:
        engine.step()
        if len(last.block_table) == 6 and last.num_preemptions == 0:
            engine.add(make_hungry(1, engine))
    engine.run()
    assert last.num_preemptions == 1
    assert sorted(engine.finished) == [0, 1]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_restored_counts_as_no_prefix_hit(way: dict[str, Any]) -> None:
    """vllm#25780: on random data a third of the tokens counted as hits, which were the victims' own."""
    engine = MiniEngine(num_blocks=12, block_size=4, **way)
    engine.add(*(make_sequence(number, prompt=8, new=12) for number in range(6)))
    engine.run()
    scheduler = engine.scheduler
    assert scheduler.counters.num_preemptions > 0
    assert (scheduler.counters.num_prefix_hit_tokens, scheduler.counters.num_swap_hit_tokens) == (0, 0)
    assert scheduler.counters.num_prefix_query_tokens == 6 * 8
