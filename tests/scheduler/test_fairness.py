"""How long anybody waits for those who come later and go first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.scheduler.factories import MiniEngine, make_sequence, make_tokens
from tidemill_scheduler import Sequence, SequenceId, policy

AGEING_STEPS = 10
WAITING = SequenceId(0)
COMMON = make_tokens(4, first=9000)

AGES = st.integers(1, 100).map(lambda half: 2 * half)


def make_ranked(*, step: int, ageing_steps: int, arrival: int, **changes: Any) -> Sequence:
    sequence = make_sequence(arrival, **changes)
    sequence.rank = policy.rank(sequence, (arrival,), step=step, ageing_steps=ageing_steps)
    return sequence


class TestPromise:
    """Of `policy.rank`, for whoever waits and anybody who comes so many steps later."""

    @given(
        step=st.integers(0, 10_000),
        later=st.integers(0, 3000),
        ageing_steps=AGES,
        levels=st.integers(1, 4),
        deadline=st.none() | st.floats(0, 9),
    )
    @example(step=9, later=10, ageing_steps=10, levels=1, deadline=None)
    def test_a_level_of_priority_is_worth_ageing_steps_and_at_most_half_as_much_more(
        self, *, step: int, later: int, ageing_steps: int, levels: int, deadline: float | None
    ) -> None:
        low = make_ranked(step=step, ageing_steps=ageing_steps, arrival=0, priority=levels, deadline=deadline)
        high = make_ranked(step=step + later, ageing_steps=ageing_steps, arrival=1, priority=0)
        if later <= levels * ageing_steps:
            assert high.rank < low.rank
        if later >= levels * ageing_steps + ageing_steps // 2:
            assert low.rank < high.rank

    @given(
        step=st.integers(0, 10_000),
        ageing_steps=AGES,
        priority=st.integers(0, 4),
        deadline=st.none() | st.floats(0, 9),
    )
    def test_an_earlier_deadline_is_worth_half_of_ageing_steps_at_most(
        self, *, step: int, ageing_steps: int, priority: int, deadline: float | None
    ) -> None:
        half = ageing_steps // 2
        waiting = make_ranked(
            step=step, ageing_steps=ageing_steps, arrival=0, priority=priority, deadline=deadline
        )
        later = make_ranked(
            step=step + half, ageing_steps=ageing_steps, arrival=1, priority=priority, deadline=-1.0
        )
        together = make_ranked(
            step=step // half * half, ageing_steps=ageing_steps, arrival=2, priority=priority, deadline=-1.0
        )
        assert together.rank < waiting.rank < later.rank


def serve_stream(engine: MiniEngine, waiting: Sequence, newcomer: Callable[[int], Sequence]) -> list[int]:
    """Let two newcomers a step, more than can be served, come after one that waits, until that one ends.

    Returns:
        how many steps after it each of those arrived that ran before it did.
    """
    engine.add(make_sequence(1, prompt=COMMON, new=16, priority=newcomer(1).priority))
    engine.step()
    start, arrivals = len(engine.history), {}
    engine.add(waiting)
    for number in range(2, 400):
        arrivals[number] = len(engine.history) - start
        engine.add(newcomer(number))
        if number % 2:
            engine.step()
        if waiting.id in engine.finished:
            return [arrivals[number] for number in started_before(engine, waiting) if number in arrivals]
    raise AssertionError("it is never served")


def started_before(engine: MiniEngine, waiting: Sequence) -> list[int]:
    """Those who had a row before this one had its first."""
    before: dict[int, None] = {}
    for plan in engine.history:
        if waiting.id in {row.sequence for row in plan.rows}:
            break
        before |= {row.sequence: None for row in plan.rows}
    return list(before)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("levels", [1, 2])
def test_a_stream_of_higher_ones_passes_a_lower_one_for_so_long_and_no_longer(
    levels: int, in_flight: int
) -> None:
    engine = MiniEngine(max_num_seqs=1, ageing_steps=AGEING_STEPS, in_flight=in_flight)
    waiting = make_sequence(WAITING, prompt=4, new=3, priority=levels)
    passed = serve_stream(engine, waiting, lambda number: make_sequence(number, prompt=4, new=2, priority=0))
    bound = levels * AGEING_STEPS + AGEING_STEPS // 2
    assert levels * AGEING_STEPS <= max(passed) < bound


@pytest.mark.parametrize("in_flight", [1, 2])
def test_nor_a_large_one_that_all_of_them_could_pass_for_want_of_memory(in_flight: int) -> None:
    """Given one that needs all memory, those that fit pass it `max_overtakes` times more."""
    engine = MiniEngine(
        num_blocks=6, block_size=4, max_overtakes=2, ageing_steps=AGEING_STEPS, in_flight=in_flight
    )
    waiting = make_sequence(WAITING, prompt=22, new=3, priority=1)
    passed = serve_stream(engine, waiting, lambda number: make_sequence(number, prompt=4, new=2, priority=0))
    bound = AGEING_STEPS + AGEING_STEPS // 2
    assert sorted(passed)[-3] >= AGEING_STEPS
    assert sum(arrival >= bound for arrival in passed) <= 2


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_stream_of_earlier_deadlines_passes_one_without_for_no_longer_than_a_span(in_flight: int) -> None:
    engine = MiniEngine(max_num_seqs=1, ageing_steps=AGEING_STEPS, in_flight=in_flight)
    waiting = make_sequence(WAITING, prompt=4, new=3)
    passed = serve_stream(
        engine, waiting, lambda number: make_sequence(number, prompt=4, new=2, deadline=float(number))
    )
    assert 0 < len(passed) <= AGEING_STEPS
    assert max(passed) < AGEING_STEPS // 2


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_stream_that_begins_like_one_that_runs_passes_another_for_no_longer_than_a_span(
    in_flight: int,
) -> None:
    engine = MiniEngine(max_num_seqs=1, block_size=2, ageing_steps=AGEING_STEPS, in_flight=in_flight)
    waiting = make_sequence(WAITING, prompt=4, new=3)
    passed = serve_stream(
        engine, waiting, lambda number: make_sequence(number, prompt=[*COMMON, number], new=2)
    )
    assert 0 < len(passed) <= AGEING_STEPS
    assert max(passed) < AGEING_STEPS // 2


class TestOvertaking:
    """Of one that is blocked because it is large, by small ones that fit."""

    def overtakers(self, engine: MiniEngine) -> int:
        """How many that came later ran before the large one."""
        return len(started_before(engine, engine.sequences[SequenceId(1)])) - 1

    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("max_overtakes", [1, 3, 7])
    def test_goes_on_so_often_and_no_longer(self, max_overtakes: int, in_flight: int) -> None:
        engine = MiniEngine(num_blocks=8, block_size=4, max_overtakes=max_overtakes, in_flight=in_flight)
        engine.add(make_sequence(0, prompt=8, new=17))
        engine.step()
        engine.add(make_sequence(1, prompt=24, new=1))
        engine.add(*(make_sequence(number, prompt=3, new=1) for number in range(2, 40)))
        engine.run()
        assert self.overtakers(engine) == max_overtakes

    def test_of_several_is_counted_for_each_of_them(self) -> None:
        engine = MiniEngine(num_blocks=8, block_size=4, max_overtakes=4)
        engine.add(make_sequence(0, prompt=8, new=17))
        engine.step()
        engine.add(make_sequence(1, prompt=24, new=1), second := make_sequence(2, prompt=25, new=1))
        engine.add(*(make_sequence(number, prompt=3, new=1) for number in range(3, 40)))
        engine.step()
        assert second.num_overtaken == engine.sequences[SequenceId(1)].num_overtaken == 4
        engine.run()
        assert self.overtakers(engine) == 4
        assert engine.finished.index(SequenceId(2)) == engine.finished.index(SequenceId(1)) + 1
