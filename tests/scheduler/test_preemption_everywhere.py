"""Preempted at every token, its memory overwritten before it comes back: the same tokens, and exact counts.

`MiniEngine` compares each finished sequence with what the fake model generates undisturbed, and both
tiers with what they are said to hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from tests.scheduler.factories import MiniEngine, make_hungry, make_sequence, make_tokens
from tidemill_scheduler import PreemptionMode, RestoreCosts, Sequence, SequenceId

BLOCK_SIZE = 4
NUM_BLOCKS = 12
PROMPTS = [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 2]
NEW = 2 * BLOCK_SIZE + 1
VICTIM = SequenceId(0)
CHEAP_COPIES, DEAR_COPIES = RestoreCosts(1.0, 1e-6), RestoreCosts(1e-6, 1.0)


@dataclass(frozen=True)
class Restore:
    """How a preempted sequence is meant to come back."""

    mode: PreemptionMode
    num_swap_blocks: int
    costs: RestoreCosts

    def make_engine(self, **changes: Any) -> MiniEngine:
        sizes: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
        engine = MiniEngine(
            num_swap_blocks=self.num_swap_blocks, preemption_mode=self.mode, **(sizes | changes)
        )
        engine.scheduler.costs = self.costs
        return engine


BY_SWAP = [
    pytest.param(Restore(PreemptionMode.SWAP, 40, DEAR_COPIES), id="swap"),
    pytest.param(Restore(PreemptionMode.AUTO, 40, CHEAP_COPIES), id="auto, copying is cheap"),
]
BY_RECOMPUTE = [
    pytest.param(Restore(PreemptionMode.RECOMPUTE, 40, CHEAP_COPIES), id="recompute"),
    pytest.param(Restore(PreemptionMode.AUTO, 40, DEAR_COPIES), id="auto, copying is dear"),
    pytest.param(Restore(PreemptionMode.AUTO, 0, CHEAP_COPIES), id="no swap space"),
]
TOO_SMALL = [
    pytest.param(Restore(PreemptionMode.SWAP, num_blocks, CHEAP_COPIES), id=f"room for {num_blocks}")
    for num_blocks in (1, 2)
]


def run_with_hunger(engine: MiniEngine, is_due: Callable[[Sequence], bool]) -> int:
    """Each time it is due, let a hungry one take all memory from the victim; return how often."""
    victim, num_hungry = engine.sequences[VICTIM], 0
    while VICTIM not in engine.finished:
        if is_due(victim) and not victim.is_complete:
            num_hungry += 1
            engine.add(make_hungry(100 + num_hungry, engine))
        engine.step()
    engine.run()
    return num_hungry


def preempted_at(computed: int) -> Callable[[Sequence], bool]:
    """Once, when so many of its tokens have been computed."""
    waits = iter([True])
    return lambda victim: victim.num_computed_tokens == computed and next(waits, False)


def in_step(number: int) -> Callable[[Sequence], bool]:
    """Once, before the step of this number."""
    steps = count(1)
    return lambda victim: next(steps) == number


def one_token_a_step(engine_of: Callable[..., MiniEngine], **changes: Any) -> MiniEngine:
    """An engine in which prompts are computed token by token too, so that each one can be preempted at."""
    return engine_of(max_num_seqs=1, max_num_batched_tokens=1, **changes)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("restore", BY_SWAP)
def test_by_swap_only_the_partly_filled_block_is_computed_again(restore: Restore, prompt: int) -> None:
    for computed in range(1, prompt + NEW - 1):
        engine = one_token_a_step(restore.make_engine, enable_prefix_caching=False)
        engine.add(make_sequence(VICTIM, prompt=prompt, new=NEW))
        assert run_with_hunger(engine, preempted_at(computed)) == 1
        num_full_blocks, rest = divmod(computed, BLOCK_SIZE)
        scheduler = engine.scheduler
        assert scheduler.counters.num_recomputed_tokens == rest
        assert (
            scheduler.counters.num_blocks_swapped_out
            == scheduler.counters.num_blocks_swapped_in
            == num_full_blocks
        )
        assert scheduler.counters.num_swap_preemptions == (num_full_blocks > 0)
        assert sum(length for _, length in engine.rows_of(VICTIM)) == prompt + NEW - 1 + rest
        engine.check_baseline()


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("restore", BY_RECOMPUTE)
def test_by_recompute_all_of_it_is_computed_again(restore: Restore, prompt: int) -> None:
    for computed in range(1, prompt + NEW - 1):
        engine = one_token_a_step(restore.make_engine)
        engine.add(make_sequence(VICTIM, prompt=prompt, new=NEW))
        assert run_with_hunger(engine, preempted_at(computed)) == 1
        scheduler = engine.scheduler
        assert (scheduler.counters.num_preemptions, scheduler.counters.num_swap_preemptions) == (1, 0)
        assert scheduler.counters.num_recomputed_tokens == computed
        assert scheduler.counters.num_blocks_swapped_out == scheduler.counters.num_blocks_swapped_in == 0
        engine.check_baseline()


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("restore", TOO_SMALL)
def test_swap_space_that_is_too_small_saves_the_beginning(restore: Restore, prompt: int) -> None:
    for computed in range(1, prompt + NEW - 1):
        engine = one_token_a_step(restore.make_engine, enable_prefix_caching=False)
        engine.add(make_sequence(VICTIM, prompt=prompt, new=NEW))
        run_with_hunger(engine, preempted_at(computed))
        num_saved = min(computed // BLOCK_SIZE, restore.num_swap_blocks)
        assert engine.scheduler.counters.num_blocks_swapped_in == num_saved
        assert engine.scheduler.counters.num_recomputed_tokens == computed - num_saved * BLOCK_SIZE
        engine.check_baseline()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("restore", [*BY_SWAP, *BY_RECOMPUTE, *TOO_SMALL])
def test_at_every_token_from_the_second_on(restore: Restore, caching: bool) -> None:
    """It goes out after each block of progress, whatever comes back with it."""
    engine = restore.make_engine(enable_prefix_caching=caching)
    engine.add(make_sequence(VICTIM, prompt=6, new=20))
    lengths: list[int] = []

    def has_grown(victim: Sequence) -> bool:
        grown = victim.num_output_tokens > 0 and len(victim.token_ids) not in lengths
        lengths.append(len(victim.token_ids))
        return grown

    assert run_with_hunger(engine, has_grown) == engine.scheduler.counters.num_preemptions == 19
    engine.check_baseline()


@pytest.mark.parametrize("chunk", [1, 3, 5])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("neighbour", ["alone", "held by another", "has been held"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("restore", [BY_SWAP[0], BY_RECOMPUTE[0], TOO_SMALL[0]])
def test_in_any_step_beside_anybody(
    restore: Restore, caching: bool, neighbour: str, in_flight: int, chunk: int
) -> None:
    """Chunks of prefill, plans in flight, and a beginning that another one holds, or had held."""
    num_preempted = 0
    prompt = make_tokens(2 * BLOCK_SIZE + 2)
    for step in range(1, 24):
        engine = restore.make_engine(
            enable_prefix_caching=caching,
            in_flight=in_flight,
            max_num_seqs=3,
            max_num_batched_tokens=max(3, chunk),
            max_prefill_chunk=chunk,
        )
        if neighbour == "held by another":
            engine.add(make_sequence(1, prompt=prompt, new=NEW, priority=0))
        elif neighbour == "has been held":
            engine.add(make_sequence(1, prompt=prompt, new=1))
            engine.run()
        engine.add(victim := make_sequence(VICTIM, prompt=[*prompt, 7], new=NEW))
        run_with_hunger(engine, in_step(step))
        num_preempted += victim.num_preemptions
        assert set(engine.finished) == set(engine.sequences)
        engine.check_baseline()
    assert num_preempted >= 6, "it was hardly ever running when it should have been preempted"


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("restore", BY_SWAP)
def test_what_another_one_holds_is_neither_copied_nor_computed_again(
    restore: Restore, in_flight: int
) -> None:
    """Given two with 8 tokens in common, the one that goes out takes its own full block along only."""
    engine = restore.make_engine(in_flight=in_flight)
    beginning = make_tokens(2 * BLOCK_SIZE)
    engine.add(make_sequence(1, prompt=[*beginning, 1], new=16, priority=0))
    engine.add(victim := make_sequence(VICTIM, prompt=[*beginning, *make_tokens(6, first=5000)], new=NEW))
    while victim.num_computed_tokens < 15:
        engine.step()
    engine.add(make_hungry(2, engine, spare=1))  # a block for the one that goes on
    engine.run()
    assert victim.num_preemptions == engine.scheduler.counters.num_preemptions == 1
    assert engine.scheduler.counters.num_blocks_swapped_in == 1
    assert engine.scheduler.counters.num_recomputed_tokens == 15 - 3 * BLOCK_SIZE
    engine.check_baseline()
