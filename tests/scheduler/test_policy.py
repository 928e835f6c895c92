from typing import Any

import pytest

from tests.scheduler.factories import make_sequence
from tidemill_scheduler import RestoreCosts, Sequence, policy
from tidemill_scheduler.sequence import PrefixPlace


def make_ranked(
    number: int, *, step: int = 0, computed: int = 0, place: PrefixPlace | None = None, **changes: Any
) -> Sequence:
    sequence = make_sequence(number, **changes)
    sequence.arrival = number
    sequence.rank = policy.rank(sequence, place or (number,), step=step, ageing_steps=100)
    sequence.num_computed_tokens = computed
    return sequence


def choose_victim(candidates: list[Sequence]) -> Sequence:
    return policy.choose_victim(candidates, lambda candidate: float(candidate.num_computed_tokens))


class TestRank:
    def test_priority_comes_first(self) -> None:
        low, high = make_ranked(0, step=0, priority=2), make_ranked(1, step=50, priority=0)
        assert high.rank < low.rank

    def test_then_the_time_of_arrival(self) -> None:
        assert make_ranked(0, step=1).rank < make_ranked(1, step=2).rank
        assert make_ranked(0).rank < make_ranked(1).rank

    def test_of_those_that_arrive_together_the_earlier_deadline_comes_first(self) -> None:
        never, late, soon = make_ranked(0), make_ranked(1, deadline=9.0), make_ranked(2, deadline=1.0)
        assert soon.rank < late.rank < never.rank

    def test_a_deadline_counts_for_nothing_beside_priority(self) -> None:
        urgent = make_ranked(0, priority=2, deadline=0.0)
        assert make_ranked(1, priority=1).rank < urgent.rank

    def test_nor_for_one_of_a_later_span(self) -> None:
        waiting = make_ranked(0, step=49)
        assert make_ranked(1, step=49, deadline=0.0).rank < waiting.rank
        assert waiting.rank < make_ranked(2, step=50, deadline=0.0).rank

    def test_of_those_with_the_same_deadline_the_ones_that_begin_alike_stay_together(self) -> None:
        first, stranger = make_ranked(0, place=(0, 0)), make_ranked(1, place=(1, 1))
        alike, urgent = make_ranked(2, place=(0, 2)), make_ranked(3, place=(3, 3), deadline=5.0)
        assert urgent.rank < first.rank < alike.rank < stranger.rank

    def test_a_level_of_priority_is_worth_so_many_steps_of_waiting(self) -> None:
        old = make_ranked(0, step=0, priority=1)
        assert make_ranked(1, step=99, priority=0).rank < old.rank
        assert old.rank < make_ranked(1, step=150, priority=0).rank


class TestVictim:
    def test_lowest_priority_goes_first(self) -> None:
        costly = make_ranked(0, computed=90, priority=2)
        cheap = make_ranked(1, computed=1, priority=1)
        assert choose_victim([costly, cheap]) is costly

    def test_then_the_cheapest_to_restore(self) -> None:
        """vllm#54644: the least computed, though it is the oldest."""
        cheap, costly = make_ranked(0, computed=10), make_ranked(1, computed=20)
        assert choose_victim([cheap, costly]) is cheap

    def test_then_the_last_in_the_order(self) -> None:
        first, last = make_ranked(0, computed=10), make_ranked(1, computed=10)
        assert choose_victim([last, first]) is last

    @pytest.mark.parametrize(("seconds_per_block", "victim"), [(0.01, 0), (4.0, 1)])
    def test_which_of_them_is_the_cheapest_depends_on_the_costs(
        self, seconds_per_block: float, victim: int
    ) -> None:
        """One with nothing but full blocks is cheap to copy, one with few tokens to compute."""
        candidates = [make_ranked(0, computed=100), make_ranked(1, computed=15)]

        def restore_seconds(candidate: Sequence) -> float:
            return policy.restore_seconds(
                num_tokens=candidate.num_computed_tokens,
                num_blocks=candidate.num_computed_tokens // 10,
                block_size=10,
                costs=RestoreCosts(1.0, seconds_per_block),
            )

        assert policy.choose_victim(candidates, restore_seconds) is candidates[victim]


class TestRestoring:
    COSTS = RestoreCosts(seconds_per_token=0.5, seconds_per_block=3.0)

    @pytest.mark.parametrize(
        ("num_tokens", "num_blocks", "seconds"), [(0, 0, 0.0), (10, 0, 5.0), (10, 2, 13.0), (8, 2, 12.0)]
    )
    def test_costs_two_copies_of_each_block_and_the_other_tokens(
        self, num_tokens: int, num_blocks: int, seconds: float
    ) -> None:
        found = policy.restore_seconds(
            num_tokens=num_tokens, num_blocks=num_blocks, block_size=4, costs=self.COSTS
        )
        assert found == seconds

    @pytest.mark.parametrize(
        ("num_tokens", "num_out", "num_in", "prefers"),
        [
            (24, 2, 2, False),  # 12 s either way
            (25, 2, 2, True),
            (24, 1, 2, True),  # one of them is there already
            (12, 0, 2, False),
            (13, 0, 2, True),
            (0, 0, 0, False),
        ],
    )
    def test_by_copying_is_preferred_where_it_costs_less(
        self, num_tokens: int, num_out: int, num_in: int, prefers: bool
    ) -> None:
        found = policy.prefers_swap(num_tokens=num_tokens, num_out=num_out, num_in=num_in, costs=self.COSTS)
        assert found is prefers

    @pytest.mark.parametrize(
        ("reuse", "seconds_per_block", "saves"),
        [(0.5, 0.66, True), (0.5, 0.67, False), (1.0, 0.99, True), (1.0, 1.01, False), (0.0, 1e-9, False)],
    )
    def test_of_what_nobody_is_known_to_need_is_paid_for_by_those_that_are_wanted_again(
        self, reuse: float, seconds_per_block: float, saves: bool
    ) -> None:
        """All are copied out, and some of them back, which saves 2 s of computing each."""
        costs = RestoreCosts(seconds_per_token=0.5, seconds_per_block=seconds_per_block)
        assert policy.is_worth_saving(reuse=reuse, block_size=4, costs=costs) is saves


class TestMarks:
    @pytest.mark.parametrize(
        ("num_blocks", "watermark", "reserve", "relief"),
        [(1000, 0.01, 10, 40), (99, 0.01, 0, 3), (20, 0.1, 2, 8), (20, 0.0, 0, 0)],
    )
    def test_are_shares_of_the_memory_in_whole_blocks(
        self, num_blocks: int, watermark: float, reserve: int, relief: int
    ) -> None:
        assert policy.admission_reserve(num_blocks=num_blocks, watermark=watermark) == reserve
        assert policy.relief_mark(num_blocks=num_blocks, watermark=watermark) == relief

    def test_relief_asks_for_more_than_admitting_leaves(self) -> None:
        for num_blocks in range(25, 3000, 7):
            reserve = policy.admission_reserve(num_blocks=num_blocks, watermark=0.01)
            assert policy.relief_mark(num_blocks=num_blocks, watermark=0.01) > reserve


class TestDisplacement:
    def test_takes_the_place_of_a_lower_priority_behind_it(self) -> None:
        assert policy.may_displace(make_ranked(1, priority=0), make_ranked(0, priority=1))

    def test_never_of_an_equal(self) -> None:
        assert not policy.may_displace(make_ranked(0), make_ranked(1))

    def test_never_of_one_that_age_has_put_before_it(self) -> None:
        aged = make_ranked(0, step=0, priority=1)
        assert not policy.may_displace(make_ranked(1, step=150, priority=0), aged)

    def test_never_of_one_whose_last_token_is_in_flight(self) -> None:
        leaving = make_ranked(0, priority=2)
        leaving.num_tokens = leaving.max_total_tokens
        assert not policy.may_displace(make_ranked(1, priority=0), leaving)

    def test_never_of_the_sibling_it_shares_blocks_with(self) -> None:
        parent, fork = make_ranked(0, priority=2), make_ranked(1, priority=0)
        fork.parent = parent
        assert not policy.may_displace(fork, parent)


class TestOvertaking:
    def test_is_allowed_so_often_for_each_that_is_passed(self) -> None:
        blocked = [make_sequence(0), make_sequence(1)]
        blocked[1].num_overtaken = 2
        assert policy.may_overtake(blocked, max_overtakes=3)
        assert not policy.may_overtake(blocked, max_overtakes=2)
        assert policy.may_overtake([], max_overtakes=1)


class TestShareOut:
    def share(self, *prompts: int, budget: int, chunk: int = 100, chunked: bool = True) -> list[int]:
        prefills = [make_ranked(number, prompt=prompt) for number, prompt in enumerate(prompts)]
        shares = policy.share_out(reversed(prefills), budget=budget, chunk=chunk, chunked=chunked)
        counts = {sequence.id: count for sequence, count in shares}
        return [counts.get(sequence.id, 0) for sequence in prefills]

    def test_first_come_first_served_within_the_budget(self) -> None:
        assert self.share(10, 10, 10, budget=15) == [10, 5, 0]

    def test_a_long_prompt_leaves_room_for_those_behind_it(self) -> None:
        assert self.share(90, 10, budget=40, chunk=30) == [30, 10]

    def test_a_prompt_that_may_not_be_cut_is_taken_whole_or_not_at_all(self) -> None:
        assert self.share(20, 10, budget=25, chunk=5, chunked=False) == [20, 0]
        assert self.share(30, 10, budget=25, chunk=5, chunked=False) == [0, 10]

    def test_nothing_is_left(self) -> None:
        assert self.share(10, budget=0) == [0]
