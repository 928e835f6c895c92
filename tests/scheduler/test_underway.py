"""A beginning that several have in common is computed once, though they all come at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.factories import MiniEngine, make_sequence, make_tokens, rows
from tidemill_scheduler import Sequence, SequenceId
from tidemill_scheduler.sequence import SequenceState

BLOCK_SIZE = 4
COMMON = 4 * BLOCK_SIZE
LEADER = SequenceId(0)


def make_alike(count: int, *, first: int = 0, tokens: int = COMMON, **changes: Any) -> list[Sequence]:
    """So many with `tokens` prompt tokens in common, and one of their own."""
    return [
        make_sequence(number, prompt=[*make_tokens(tokens), number], new=4, **changes)
        for number in range(first, first + count)
    ]


def make_led(count: int = 4, **changes: Any) -> MiniEngine:
    """An engine that has admitted the leader, whose prompt takes four steps more; the others stand aside."""
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 12, "max_prefill_chunk": 4}
    engine = MiniEngine(**(sizes | changes))
    engine.add(make_sequence(100, prompt=2, new=30))  # a decode, so that chunks are cut
    engine.step()
    engine.add(*make_alike(count))
    assert rows(engine.step()).keys() == {100, LEADER}
    assert engine.scheduler.num_waiting == count - 1
    return engine


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks", [10, 32])
@pytest.mark.parametrize("count", [2, 8])
def test_a_common_beginning_is_computed_once(count: int, num_blocks: int, in_flight: int) -> None:
    engine = MiniEngine(block_size=BLOCK_SIZE, num_blocks=num_blocks, in_flight=in_flight)
    engine.add(*make_alike(count))
    engine.run()
    assert engine.num_prompt_tokens_computed == COMMON + count
    assert engine.scheduler.counters.num_prefix_hit_tokens == (count - 1) * COMMON
    engine.check_baseline()


@pytest.mark.parametrize("tokens", [1, BLOCK_SIZE - 1])
def test_less_than_a_block_is_waited_for_by_nobody(tokens: int) -> None:
    engine = MiniEngine(block_size=BLOCK_SIZE)
    engine.add(*make_alike(3, tokens=tokens))
    assert rows(engine.schedule()).keys() == {0, 1, 2}


def test_it_is_waited_for_only_as_far_as_it_goes() -> None:
    """Given one block of five in common, the other four are computed side by side."""
    engine = MiniEngine(block_size=BLOCK_SIZE, max_num_batched_tokens=12, max_prefill_chunk=4)
    own = [[*make_tokens(4), *make_tokens(17, first=1000 * number)] for number in (5, 6)]
    engine.add(*(make_sequence(number, prompt=prompt, new=2) for number, prompt in enumerate(own)))
    engine.add(make_sequence(2, prompt=2, new=9))
    assert rows(engine.step()) == {0: (0, 4, False), 2: (0, 2, True)}
    assert rows(engine.step()) == {2: (2, 1, True), 0: (4, 4, False), 1: (4, 4, False)}
    engine.run()


def test_a_chain_of_beginnings_is_followed_link_by_link() -> None:
    """The second goes further than the first; the third waits for the one, and then for the other."""
    engine = MiniEngine(block_size=BLOCK_SIZE, max_num_batched_tokens=24, max_prefill_chunk=4)
    for number, tokens in enumerate((8, 16, 16)):
        engine.add(make_sequence(number, prompt=[*make_tokens(tokens), number], new=2))
    engine.run()
    assert engine.num_prompt_tokens_computed == 9 + 9 + 1
    engine.check_baseline()


def test_those_who_stand_aside_are_in_nobodys_way() -> None:
    engine = make_led()
    engine.add(stranger := make_sequence(50, prompt=3, new=1))
    engine.step()
    assert stranger.id in engine.finished


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_they_are_released_when_the_leader_is_aborted(in_flight: int, steps: int) -> None:
    engine = make_led(in_flight=in_flight)
    for _ in range(steps):
        engine.step()
    engine.abort(LEADER)
    follower = engine.sequences[SequenceId(1)]
    engine.step()
    assert follower.state is SequenceState.RUNNING
    engine.run()
    assert engine.num_prompt_tokens_computed <= 2 + COMMON + 3 + (steps + 1) * BLOCK_SIZE
    engine.check_baseline()


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_or_preempted(in_flight: int, steps: int) -> None:
    """All memory is given to somebody else; afterwards one of them leads again."""
    engine = make_led(in_flight=in_flight, num_blocks=12)
    for _ in range(steps):
        engine.step()
    leader = engine.sequences[LEADER]
    if not leader.is_complete:
        engine.scheduler.preempt(LEADER)
    assert not engine.scheduler._waiting.num_aside
    engine.add(make_sequence(60, prompt=40, new=1, priority=0))
    engine.run()
    assert leader.num_preemptions >= 1
    engine.check_baseline()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_one_that_stands_aside_may_be_aborted(in_flight: int) -> None:
    engine = make_led(in_flight=in_flight)
    engine.abort(SequenceId(2))
    engine.run()
    assert engine.num_prompt_tokens_computed == 2 + COMMON + 3
    engine.check_baseline()


@pytest.mark.parametrize("changes", [{"priority": 0}, {"deadline": 1.0}], ids=["priority", "deadline"])
def test_one_that_goes_first_does_not_wait_for_a_leader_behind_it(changes: dict[str, Any]) -> None:
    engine = make_led()
    engine.add(*make_alike(1, first=9, **changes))
    assert {9, LEADER} <= rows(engine.step()).keys()
    engine.run()


def test_but_a_lower_one_waits_for_a_higher_leader() -> None:
    engine = make_led()
    engine.add(*make_alike(1, first=9, priority=2))
    engine.run()
    assert engine.num_prompt_tokens_computed == 2 + COMMON + 5


def test_other_salts_do_not_wait_for_each_other_and_share_nothing() -> None:
    engine = make_led()
    engine.add(*make_alike(1, first=9, salt=b"another"))
    assert {9, LEADER} <= rows(engine.step()).keys()
    engine.run()
    assert engine.num_prompt_tokens_computed == 2 + COMMON + 4 + COMMON + 1


def test_one_that_computes_its_prompt_by_itself_waits_for_nobody() -> None:
    engine = make_led()
    engine.add(*make_alike(1, first=9, compute_prompt=True))
    assert {9, LEADER} <= rows(engine.step()).keys()
    engine.run()


def test_without_prefix_caching_nobody_waits() -> None:
    engine = MiniEngine(block_size=BLOCK_SIZE, enable_prefix_caching=False)
    engine.add(*make_alike(3))
    assert rows(engine.step()).keys() == {0, 1, 2}


def test_a_beginning_that_was_computed_before_is_not_waited_for() -> None:
    engine = MiniEngine(block_size=BLOCK_SIZE)
    engine.add(*make_alike(1))
    engine.run()
    engine.add(*make_alike(3, first=1))
    assert rows(engine.step()) == {number: (COMMON, 1, True) for number in (1, 2, 3)}
    engine.run()


def test_nor_one_that_is_in_the_swap_space() -> None:
    engine = MiniEngine(block_size=BLOCK_SIZE, num_blocks=8, num_swap_blocks=40)
    engine.add(*make_alike(1))
    engine.run()
    engine.add(make_sequence(50, prompt=30, new=1))
    engine.run()
    engine.add(*make_alike(3, first=1))
    assert rows(engine.step()) == {number: (COMMON, 1, True) for number in (1, 2, 3)}
    engine.run()


def test_a_leader_is_forgotten_once_it_has_led() -> None:
    """Else each of those that wait one after another would keep the one before it in memory."""
    engine = make_led()
    assert {one.leader for one in engine.sequences.values()} == {None, engine.sequences[LEADER]}
    engine.run()
    assert {one.leader for one in engine.sequences.values()} == {None}
