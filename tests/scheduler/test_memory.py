"""Both tiers together: what is copied, when, and what becomes of it if its sequence ends meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from tests.scheduler.factories import MiniEngine, make_hungry, make_sequence, make_tokens
from tidemill_scheduler import PreemptionMode, RestoreCosts, Sequence, SequenceId, StepPlan
from tidemill_scheduler.sequence import SequenceState

BLOCK_SIZE = 4
NUM_BLOCKS = 8
VICTIM, HUNGRY, OTHER = SequenceId(0), SequenceId(1), SequenceId(2)


def make_engine(**changes: Any) -> MiniEngine:
    """Eight blocks on the device, and swap space for all there is in a test."""
    sizes: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "num_swap_blocks": 40,
        "preemption_mode": PreemptionMode.SWAP,
    }
    return MiniEngine(**(sizes | changes))


def make_swapped_out(**changes: Any) -> tuple[MiniEngine, Sequence]:
    """An engine whose victim, 13 tokens computed, waits: three full blocks of it are in the swap space only.

    The hungry one that drove it out has ended.
    """
    engine = make_engine(enable_prefix_caching=False, **changes)
    engine.add(victim := make_sequence(VICTIM, prompt=13, new=8))
    engine.step()
    if engine.in_flight == 2:
        engine.land()
    engine.add(make_hungry(HUNGRY, engine))
    while HUNGRY not in engine.finished:
        engine.step()
    assert victim.state is SequenceState.WAITING
    assert engine.scheduler.swap_usage == 3 / 40
    return engine, victim


def copies_of(plan: StepPlan) -> tuple[int, int]:
    """How many blocks go out and in."""
    return len(plan.swap_out), len(plan.swap_in)


class TestSwappingOut:
    def test_is_put_off_until_the_block_is_given_away(self) -> None:
        engine = make_engine()
        engine.add(make_sequence(VICTIM, prompt=13, new=8))
        engine.step()
        engine.scheduler.preempt(VICTIM)
        assert engine.scheduler.swap_usage == 3 / 40
        engine.run()
        assert all(copies_of(plan) == (0, 0) for plan in engine.history)
        assert engine.scheduler.counters.num_swap_preemptions == 1
        assert engine.scheduler.counters.num_recomputed_tokens == 1

    def test_happens_in_the_plan_that_gives_it_away(self) -> None:
        engine, _ = make_swapped_out()
        prefill, hungry = engine.history
        (victims,) = prefill.rows
        assert [copy.source for copy in hungry.swap_out] == list(victims.block_tables[0][2::-1])
        assert {row.sequence for row in hungry.rows} == {HUNGRY}

    def test_what_is_in_the_swap_space_is_not_copied_twice(self) -> None:
        engine, victim = make_swapped_out()
        engine.step()
        assert victim.state is SequenceState.RUNNING
        engine.add(make_hungry(OTHER, engine))
        engine.run()
        assert victim.num_preemptions == 2
        assert engine.scheduler.counters.num_blocks_swapped_out == 3
        assert engine.scheduler.counters.num_blocks_swapped_in == 6

    def test_only_the_end_that_did_not_fit_is_lost(self) -> None:
        engine = make_engine(enable_prefix_caching=False, num_swap_blocks=2)
        engine.add(make_sequence(VICTIM, prompt=13, new=8))
        engine.step()
        engine.add(make_hungry(HUNGRY, engine))
        engine.run()
        assert engine.rows_of(VICTIM)[:2] == [(0, 13), (8, 6)]
        assert engine.scheduler.counters.num_blocks_swapped_out == 2

    def test_what_all_is_held_by_another_needs_no_room(self) -> None:
        engine = make_engine()
        engine.add(make_sequence(OTHER, prompt=make_tokens(9), new=6, priority=0))
        engine.step()
        engine.add(victim := make_sequence(VICTIM, prompt=make_tokens(9), new=6))
        engine.step()
        engine.scheduler.preempt(VICTIM)
        assert (victim.num_kept_blocks, engine.scheduler.swap_usage) == (0, 0.0)
        assert engine.scheduler.counters.num_swap_preemptions == 0
        engine.run()

    def test_costs_decide_block_by_block(self) -> None:
        """A block is 4 tokens: kept where two copies are cheaper than these."""
        for seconds_per_block, keeps in [(1.9, True), (2.1, False)]:
            engine = make_engine(preemption_mode=PreemptionMode.AUTO)
            engine.scheduler.costs = RestoreCosts(1.0, seconds_per_block)
            engine.add(make_sequence(VICTIM, prompt=13, new=8))
            engine.step()
            engine.scheduler.preempt(VICTIM)
            assert engine.scheduler.counters.num_swap_preemptions == keeps
            assert engine.scheduler.swap_usage == 3 / 40 * keeps
            engine.run()


class TestSwappingIn:
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_comes_with_the_rows_that_go_on_from_there(self, in_flight: int) -> None:
        engine, _ = make_swapped_out(in_flight=in_flight)
        plan = engine.schedule()
        assert copies_of(plan) == (0, 3)
        (row,) = plan.rows
        assert (row.sequence, row.start) == (VICTIM, 12)
        assert sorted(copy.target for copy in plan.swap_in) == sorted(row.block_tables[0][:3])
        engine.run()
        assert engine.scheduler.swap_usage == 0

    def test_that_lacks_memory_for_the_whole_sequence_moves_nothing(self) -> None:
        engine, victim = make_swapped_out()
        engine.add(
            make_hungry(OTHER, engine, spare=3)
        )  # three blocks for its prefix, none for its last tokens
        plan = engine.schedule()
        assert copies_of(plan) == (0, 0)
        assert (victim.state, victim.block_table) == (SequenceState.WAITING, [])
        assert (engine.scheduler.swap_usage, engine.scheduler._memory.pool.num_free) == (3 / 40, 3)
        engine.run()
        assert engine.scheduler.counters.num_blocks_swapped_in == 3

    def test_in_the_plan_that_swaps_it_out_follows_on_that(self) -> None:
        """Given a cached prompt whose blocks one newcomer takes, and the next one begins with."""
        engine = make_engine()
        engine.add(make_sequence(0, prompt=make_tokens(5), new=1))
        engine.run()
        engine.add(make_sequence(1, prompt=6 * BLOCK_SIZE, new=1))
        engine.run()
        engine.add(make_sequence(2, prompt=2 * BLOCK_SIZE, new=1))
        engine.add(make_sequence(3, prompt=[*make_tokens(5), 9], new=1))
        plan = engine.schedule()
        written = {copy.target for copy in plan.swap_out}
        assert {copy.source for copy in plan.swap_in} <= written
        assert len(plan.swap_in) == 1
        engine.run()

    def test_of_a_beginning_is_shared_with_whoever_is_placed_after(self) -> None:
        engine = make_engine()
        engine.add(make_sequence(0, prompt=make_tokens(9), new=1))
        engine.run()
        engine.add(make_hungry(1, engine))
        engine.run()
        engine.add(*(make_sequence(number, prompt=make_tokens(9), new=1) for number in (2, 3)))
        plan = engine.schedule()
        first, second = plan.rows
        assert first.block_tables[0][:2] == second.block_tables[0][:2]
        assert copies_of(plan)[1] == 2
        assert engine.scheduler.counters.num_swap_hit_tokens == 8
        engine.run()


class TestEndingMeanwhile:
    def check_ended(self, engine: MiniEngine) -> None:
        """All of it is over, and its contents are a cache like any other's."""
        engine.run()
        engine.check_baseline()
        assert len(engine.scheduler._memory.swap._cached) == len(engine.scheduler._memory.swap._slots)

    def test_while_it_waits(self) -> None:
        engine, victim = make_swapped_out()
        engine.abort(VICTIM)
        assert engine.scheduler.swap_usage == 0
        assert engine.schedule().is_empty
        assert victim.num_output_tokens == 1
        self.check_ended(engine)

    def test_while_nothing_of_it_has_been_copied_yet(self) -> None:
        engine = make_engine()
        engine.add(make_sequence(VICTIM, prompt=13, new=8))
        engine.step()
        engine.scheduler.preempt(VICTIM)
        engine.abort(VICTIM)
        self.check_ended(engine)
        assert engine.scheduler.counters.num_blocks_swapped_out == 0

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_while_its_swap_in_is_in_flight(self, in_flight: int) -> None:
        engine, victim = make_swapped_out(in_flight=in_flight)
        known = list(victim.token_ids)
        assert copies_of(engine.schedule()) == (0, 3)
        if in_flight == 2:
            assert engine.schedule().num_tokens == 1
        engine.abort(VICTIM)
        assert engine.scheduler.kv_usage > 0  # the copies are still to be made
        self.check_ended(engine)
        assert victim.token_ids == known

    @pytest.mark.parametrize("preempts", [True, False])
    def test_while_another_one_shares_what_is_swapped_in(self, preempts: bool) -> None:
        """Given a swap-in for two, when the first is gone before it is made, it is there for the second."""
        engine = make_engine(in_flight=2)
        engine.add(make_sequence(0, prompt=make_tokens(9), new=1))
        engine.run()
        engine.add(make_hungry(1, engine))
        engine.run()
        engine.add(make_sequence(2, prompt=make_tokens(9), new=3))
        assert copies_of(engine.schedule())[1] == 2
        if preempts:
            engine.scheduler.preempt(SequenceId(2))
        else:
            engine.abort(SequenceId(2))
        engine.add(make_sequence(3, prompt=make_tokens(9), new=3))
        assert copies_of(engine.schedule())[1] == 0
        assert engine.rows_of(3) == [(8, 1)]
        self.check_ended(engine)

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_preempted_again_while_its_swap_in_is_in_flight(self, in_flight: int) -> None:
        """vllm#46014: re-admitted while its transfer was outstanding, it failed an assertion."""
        engine, victim = make_swapped_out(in_flight=in_flight)
        engine.schedule()
        engine.scheduler.preempt(VICTIM)
        engine.check()
        engine.run()
        assert (victim.num_preemptions, engine.scheduler.counters.num_blocks_swapped_in) == (2, 3)
        self.check_ended(engine)


class TestPrefixCache:
    """The swap space without any preemption: what the device has forgotten is found there."""

    def serve_twice(self, **changes: Any) -> MiniEngine:
        """Four prompts of 3 blocks each, one after the other, and once more, on a device of 8 blocks."""
        engine = make_engine(**changes)
        for number in range(8):
            engine.add(make_sequence(number, prompt=make_tokens(13, first=1000 * (number % 4)), new=1))
            engine.run()
        assert engine.scheduler.counters.num_preemptions == 0
        engine.check_baseline()
        return engine

    def test_is_as_large_as_both_tiers(self) -> None:
        scheduler = self.serve_twice().scheduler
        assert scheduler.counters.num_prefix_query_tokens == 8 * 13
        assert scheduler.counters.num_prefix_hit_tokens == 4 * 12
        assert (
            scheduler.counters.num_swap_hit_tokens
            == scheduler.counters.num_blocks_swapped_in * BLOCK_SIZE
            == 4 * 12
        )
        assert scheduler.counters.num_recomputed_tokens == 0

    def test_takes_what_the_device_has_from_there(self) -> None:
        engine = make_engine()
        engine.add(make_sequence(0, prompt=make_tokens(13), new=1))
        engine.run()
        engine.add(make_sequence(1, prompt=6 * BLOCK_SIZE, new=1))  # evicts the end of the chain
        engine.run()
        engine.add(make_sequence(2, prompt=make_tokens(13), new=1))
        assert copies_of(engine.schedule())[1] == 1
        assert engine.scheduler.counters.num_prefix_hit_tokens == 12
        assert engine.scheduler.counters.num_swap_hit_tokens == 4
        engine.run()

    @pytest.mark.parametrize(
        "changes",
        [
            {"preemption_mode": PreemptionMode.RECOMPUTE},
            {"enable_prefix_caching": False},
            {"num_swap_blocks": 0},
        ],
        ids=["by recompute", "without prefix caching", "without swap space"],
    )
    def test_is_the_device_alone(self, changes: dict[str, Any]) -> None:
        scheduler = self.serve_twice(**changes).scheduler
        assert scheduler.counters.num_prefix_hit_tokens == 0
        assert scheduler.counters.num_swap_hit_tokens == 0
        assert (scheduler.counters.num_blocks_swapped_out, scheduler.counters.num_blocks_swapped_in) == (0, 0)

    def test_or_where_copying_is_dearer_than_computing(self) -> None:
        engine = make_engine(preemption_mode=PreemptionMode.AUTO)
        engine.scheduler.costs = RestoreCosts(1.0, 2.0)
        for number in range(4):
            engine.add(make_sequence(number, prompt=13, new=1))
            engine.run()
        assert engine.scheduler.counters.num_blocks_swapped_out == 0

    def test_saves_what_is_asked_for_again_and_learns_whether_anything_is(self) -> None:
        """Given copies that pay for themselves only if every other block is wanted once more."""
        engine = make_engine()
        engine.scheduler.costs = RestoreCosts(1.0, 4.0 / 3)

        def serve(numbers: Iterable[int]) -> int:
            before = engine.scheduler.counters.num_blocks_swapped_out
            for number in numbers:
                engine.add(
                    make_sequence(len(engine.sequences), prompt=make_tokens(13, first=1000 * number), new=1)
                )
                engine.run()
            return engine.scheduler.counters.num_blocks_swapped_out - before

        assert serve(range(30)) < 10  # of more than 80 blocks that were evicted
        assert engine.scheduler.counters.num_swap_hit_tokens == 0
        assert serve([*range(50, 54)] * 12) > 10
        assert engine.scheduler.counters.num_swap_hit_tokens > 0

    def test_never_takes_the_place_of_what_is_kept(self) -> None:
        """Given a victim that fits only alone, and small ones that pass it, all with swap space for five."""
        engine = make_engine(num_swap_blocks=5, num_blocks=10)
        engine.add(victim := make_sequence(VICTIM, prompt=17, new=20))
        engine.step()
        engine.add(make_hungry(HUNGRY, engine))
        for number in range(OTHER, 20):
            engine.add(make_sequence(number, prompt=9, new=3, priority=0))
        engine.run()
        assert victim.num_preemptions == 1
        assert engine.rows_of(VICTIM)[1][0] == 16
        assert engine.scheduler.counters.num_recomputed_tokens == 1


def churn(seed: int, **changes: Any) -> MiniEngine:
    """Two dozen sequences with common beginnings, preempted now and then."""
    random = Random(seed)
    engine = make_engine(**changes)
    for number in range(24):
        prompt = make_tokens(random.randint(1, 9), first=1000 * random.randint(0, 1))
        own = make_tokens(random.randint(1, 9), first=1000 * (number + 5))
        engine.add(make_sequence(number, prompt=prompt + own, new=random.randint(1, 9)))
    for _ in range(400):
        unfinished = sorted(engine.unfinished())
        if unfinished and random.random() < 0.2:
            engine.scheduler.preempt(random.choice(unfinished))
        engine.step()
    engine.run()
    engine.check_baseline()
    return engine


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("num_swap_blocks", [1, 3, 12])
def test_a_plan_writes_a_swap_block_once_and_not_after_it_was_to_be_read(
    num_swap_blocks: int, in_flight: int
) -> None:
    """Then it makes no difference which copies of one direction come first; see `FakeModel` for the rest."""
    plans = [
        plan
        for seed in range(10)
        for plan in churn(seed, num_swap_blocks=num_swap_blocks, in_flight=in_flight).history
    ]
    assert sum(len(plan.swap_in) for plan in plans) > 10
    for plan in plans:
        outs, ins = plan.swap_out, plan.swap_in
        for copies in (outs, ins):
            assert len({copy.target for copy in copies}) == len(copies)
        targets = {copy.target for copy in ins} | {copy.target for copy in plan.block_copies}
        assert len(targets) == len(ins) + len(plan.block_copies)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_counters_count_the_copies_of_the_plans(in_flight: int) -> None:
    engine = churn(1, in_flight=in_flight)
    outs, ins = (sum(sizes) for sizes in zip(*map(copies_of, engine.history), strict=True))
    assert engine.scheduler.counters.num_blocks_swapped_out == outs > 0
    assert engine.scheduler.counters.num_blocks_swapped_in == ins > 0
