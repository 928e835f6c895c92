from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidemill_scheduler import BlockId, IntegrityError
from tidemill_scheduler.sequence import BlockHash
from tidemill_scheduler.swap_space import SwapSpace


def make_hashes(count: int, *, first: int = 0) -> list[BlockHash]:
    return [BlockHash(b"%d" % number) for number in range(first, first + count)]


def write(swap: SwapSpace, *hashes: BlockHash) -> list[BlockId | None]:
    """Save these contents, in one plan."""
    slots = [swap.write(block_hash) for block_hash in hashes]
    swap.end_plan()
    return slots


class TestWriting:
    def test_fills_every_slot_once(self) -> None:
        swap = SwapSpace(3)
        assert sorted(slot for slot in write(swap, *make_hashes(3)) if slot is not None) == [0, 1, 2]
        assert all(block_hash in swap for block_hash in make_hashes(3))

    def test_what_is_here_is_not_copied_again(self) -> None:
        swap = SwapSpace(3)
        (first,) = make_hashes(1)
        assert swap.write(first) is not None
        assert swap.write(first) is None
        swap.end_plan()
        assert swap.write(first) is None

    def test_replaces_the_least_recently_used(self) -> None:
        swap = SwapSpace(2)
        old, used, new = make_hashes(3)
        slots = dict(zip((old, used), write(swap, old, used), strict=True))
        swap.read(old)
        swap.end_plan()
        assert swap.write(new) == slots[used]
        assert (old in swap, used in swap, new in swap) == (True, False, True)

    def test_without_slots_nothing_is_saved(self) -> None:
        swap = SwapSpace(0)
        assert write(swap, *make_hashes(1)) == [None]
        assert swap.keep(make_hashes(1)) == 0
        assert swap.usage == 0.0


class TestPlan:
    def test_writes_no_slot_twice(self) -> None:
        swap = SwapSpace(1)
        first, second = make_hashes(2)
        assert swap.write(first) is not None
        assert swap.write(second) is None
        swap.end_plan()
        assert swap.write(second) is not None

    def test_does_not_write_over_what_it_reads(self) -> None:
        swap = SwapSpace(1)
        first, second = make_hashes(2)
        (slot,) = write(swap, first)
        assert swap.read(first) == slot
        assert swap.write(second) is None
        assert first in swap

    def test_nor_after_whoever_needed_it_is_gone(self) -> None:
        swap = SwapSpace(1)
        first, second = make_hashes(2)
        swap.keep([first])
        write(swap, first)
        swap.read(first)
        swap.let_go([first])
        assert swap.write(second) is None
        swap.check_integrity(Counter())

    def test_reading_what_is_not_here_is_an_error(self) -> None:
        with pytest.raises(KeyError):
            SwapSpace(1).read(make_hashes(1)[0])


class TestKeeping:
    def test_takes_the_beginning_of_a_chain_as_far_as_there_is_room(self) -> None:
        swap = SwapSpace(3)
        assert swap.keep(make_hashes(5)) == 3
        assert [swap.is_kept(block_hash) for block_hash in make_hashes(5)] == [True] * 3 + [False] * 2
        assert swap.usage == 1.0

    def test_what_several_need_takes_room_once(self) -> None:
        swap = SwapSpace(3)
        assert swap.keep(make_hashes(3)) == swap.keep(make_hashes(3)) == 3
        assert swap.keep(make_hashes(1, first=9)) == 0
        swap.let_go(make_hashes(3))
        assert swap.usage == 1.0
        swap.let_go(make_hashes(3))
        assert swap.usage == 0.0

    def test_reserves_room_before_the_content_comes(self) -> None:
        """Cached contents give way, in whatever order they came."""
        swap = SwapSpace(2)
        cached, kept = make_hashes(2), make_hashes(2, first=5)
        write(swap, *cached)
        assert swap.keep(kept) == 2
        assert None not in write(swap, *kept)
        assert not any(block_hash in swap for block_hash in cached)

    def test_outlasts_any_number_of_cached_contents(self) -> None:
        swap = SwapSpace(3)
        kept = make_hashes(2)
        swap.keep(kept)
        write(swap, *kept)
        for number in range(10, 30):
            write(swap, *make_hashes(1, first=number))
        assert all(block_hash in swap for block_hash in kept)

    def test_what_was_cached_already_is_kept_where_it_is(self) -> None:
        swap = SwapSpace(1)
        first, second = make_hashes(2)
        (slot,) = write(swap, first)
        swap.keep([first])
        assert write(swap, second) == [None]
        assert swap.read(first) == slot

    def test_once_over_leaves_the_content_cached_its_end_to_go_first(self) -> None:
        swap = SwapSpace(3)
        chain = make_hashes(3)
        swap.keep(chain)
        write(swap, *chain)
        swap.let_go(chain)
        write(swap, *make_hashes(1, first=9))
        assert [block_hash in swap for block_hash in chain] == [True, True, False]

    def test_a_content_that_never_came_leaves_nothing(self) -> None:
        swap = SwapSpace(1)
        swap.keep(make_hashes(1))
        swap.let_go(make_hashes(1))
        swap.check_integrity(Counter())
        assert make_hashes(1)[0] not in swap


class TestIntegrity:
    def make_full(self) -> SwapSpace:
        swap = SwapSpace(2)
        swap.keep(make_hashes(1))
        write(swap, *make_hashes(2))
        swap.check_integrity(Counter(make_hashes(1)))
        return swap

    def test_a_lost_slot_is_found(self) -> None:
        swap = self.make_full()
        del swap._slots[make_hashes(1)[0]]
        with pytest.raises(IntegrityError, match="not all slots once"):
            swap.check_integrity(Counter(make_hashes(1)))

    def test_what_is_kept_for_nobody_is_found(self) -> None:
        with pytest.raises(IntegrityError, match="keeps other contents"):
            self.make_full().check_integrity(Counter())

    def test_what_can_never_be_replaced_is_found(self) -> None:
        swap = self.make_full()
        swap._cached.clear()
        with pytest.raises(IntegrityError, match="may be replaced"):
            swap.check_integrity(Counter(make_hashes(1)))


class SwapSpaceMachine(RuleBasedStateMachine):
    """Chains of few contents in few slots, against what a dictionary of slots remembers."""

    @initialize(num_blocks=st.integers(0, 4))
    def start(self, num_blocks: int) -> None:
        self.swap = SwapSpace(num_blocks)
        self.memory: dict[BlockId, BlockHash] = {}
        self.kept: list[list[BlockHash]] = []
        self.touched: set[BlockId] = set()

    @rule(first=st.integers(0, 5), count=st.integers(1, 4))
    def keep(self, first: int, count: int) -> None:
        chain = make_hashes(count, first=first)
        self.kept.append(chain[: self.swap.keep(chain)])

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.kept:
            self.swap.let_go(self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1))))

    @rule(number=st.integers(0, 8))
    def write(self, number: int) -> None:
        (content,) = make_hashes(1, first=number)
        slot = self.swap.write(content)
        if slot is None:
            return
        assert slot not in self.touched
        lost = self.memory.get(slot)
        assert lost is None or not any(lost in chain for chain in self.kept)
        self.memory[slot] = content
        self.touched.add(slot)

    @rule(number=st.integers(0, 8))
    def read(self, number: int) -> None:
        (content,) = make_hashes(1, first=number)
        if content in self.swap:
            slot = self.swap.read(content)
            assert self.memory[slot] == content
            self.touched.add(slot)

    @rule()
    def end_plan(self) -> None:
        self.swap.end_plan()
        self.touched.clear()

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "swap"):
            self.swap.check_integrity(Counter(content for chain in self.kept for content in chain))


TestSwapSpaceMachine = SwapSpaceMachine.TestCase
TestSwapSpaceMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
