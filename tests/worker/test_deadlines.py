"""Deadlines in a heap: as if all were looked at each time, in memory that follows those watched."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tidemill_worker.deadlines import Deadlines

MOVES = st.lists(
    st.tuples(st.just("add"), st.integers(0, 4), st.integers(0, 6))
    | st.tuples(st.just("discard"), st.integers(0, 4), st.none())
    | st.tuples(st.just("look"), st.none(), st.integers(0, 6)),
    min_size=10,
)


@given(MOVES)
@example(
    [("add", 0, 1), ("add", 1, 6), ("add", 2, 6), ("discard", 0, None), ("add", 0, 5), ("look", None, 3)]
)
def test_those_that_are_due_come_out_once_and_in_order(
    moves: list[tuple[str, int | None, int | None]],
) -> None:
    """An id may come back with another deadline, or with the same."""
    deadlines, watched = Deadlines(), dict[str, float]()
    for move, number, seconds in moves:
        name, moment = str(number), float(seconds or 0)
        if move == "add" and name not in watched:
            deadlines.add(name, moment)
            watched[name] = moment
        elif move == "discard":
            deadlines.discard(name)
            watched.pop(name, None)
        elif move == "look":
            due = sorted((deadline, name) for name, deadline in watched.items() if deadline <= moment)
            assert deadlines.pop_due(moment) == [name for _, name in due]
            for _, name in due:
                del watched[name]


def test_requests_that_end_in_time_leave_nothing_behind() -> None:
    """Given a day's worth of requests that each end long before their deadline, then what is kept
    follows the few that are open."""
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(str(number), 1e6 + number)
        if number >= 10:
            deadlines.discard(str(number - 10))
        assert len(deadlines._heap) <= 2 * 11
