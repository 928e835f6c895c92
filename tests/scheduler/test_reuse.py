"""What is learned about how often evicted contents are asked for again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill_scheduler.reuse import ReuseEstimate
from tidemill_scheduler.sequence import BlockHash


def make_hash(number: int) -> BlockHash:
    return BlockHash(b"%d" % number)


def evict(estimate: ReuseEstimate, *numbers: int) -> None:
    for number in numbers:
        estimate.note_evicted(make_hash(number))


def test_at_first_all_is_taken_to_be_of_use() -> None:
    assert ReuseEstimate(8).share == 1.0


def test_what_nobody_asks_for_lowers_the_share() -> None:
    estimate = ReuseEstimate(100)
    evict(estimate, *range(99))
    assert estimate.share == 1 / 100


def test_what_is_asked_for_raises_it_whether_it_was_saved_or_not() -> None:
    estimate = ReuseEstimate(100)
    evict(estimate, *range(9))
    assert estimate.note_wanted(make_hash(3))
    assert estimate.share == 2 / 10


def test_a_content_counts_once_for_each_time_it_was_evicted() -> None:
    estimate = ReuseEstimate(100)
    evict(estimate, 1, 1)
    assert estimate.note_wanted(make_hash(1))
    assert not estimate.note_wanted(make_hash(1))
    assert not estimate.note_wanted(make_hash(2))


def test_what_the_swap_space_would_have_replaced_is_not_found() -> None:
    estimate = ReuseEstimate(2)
    evict(estimate, 1, 2, 3)
    assert not estimate.note_wanted(make_hash(1))
    assert estimate.note_wanted(make_hash(3))


def test_the_latest_counts_most() -> None:
    """Given a long time without any use, a change shows within one filling of the swap space."""
    estimate = ReuseEstimate(10)
    evict(estimate, *range(1000))
    assert estimate.share < 0.01
    for number in range(1000, 1010):
        evict(estimate, number)
        estimate.note_wanted(make_hash(number))
    assert estimate.share > 0.3


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20))), st.integers(1, 8))
def test_is_a_share_and_remembers_no_more_than_it_may(events: list[tuple[bool, int]], capacity: int) -> None:
    estimate = ReuseEstimate(capacity)
    for is_evicted, number in events:
        if is_evicted:
            estimate.note_evicted(make_hash(number))
        else:
            estimate.note_wanted(make_hash(number))
        assert 0.0 <= estimate.share <= 1.0
        assert len(estimate._history) <= capacity
