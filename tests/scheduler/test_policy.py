from typing import Any

from tests.scheduler.factories import make_sequence
from tidemill_scheduler import Sequence, policy


def make_ranked(number: int, *, step: int = 0, computed: int = 0, **changes: Any) -> Sequence:
    sequence = make_sequence(number, **changes)
    sequence.arrival = number
    sequence.rank = policy.rank(sequence, (number,), step=step, ageing_steps=100)
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
