"""What a reader of a stream has been told, and what the result adds to it."""

from __future__ import annotations

from tests.tidemill.factories import make_deltas, make_result, text_of
from tidemill.jobs import Choice, Delta, Result, Status
from tidemill.told import Told


def whole(first: int, end: int) -> Result:
    """A result of these tokens, see `make_deltas`."""
    return make_result("a", text_of(first, end), token_ids=tuple(range(first, end)))


def told(*deltas: Delta) -> Told:
    made = Told()
    assert all([made.take(delta) for delta in deltas])
    return made


def restarted(delta: Delta, **changes: object) -> Delta:
    return delta.model_copy(update={"restart": True, **changes})


def test_the_result_adds_what_was_not_told() -> None:
    assert list(told(*make_deltas(2, 3)).rest(whole(0, 8))) == list(make_deltas(3, start=5))
    assert list(told(*make_deltas(2, 3)).rest(whole(0, 5))) == []


def test_after_a_restart_the_result_adds_to_the_new_generation_alone() -> None:
    (old,), (new,) = make_deltas(5), make_deltas(2, start=40)
    rest = told(old, restarted(new, index=0)).rest(whole(40, 45))
    assert list(rest) == [Delta(index=2, token_ids=(42, 43, 44), text=text_of(42, 45))]


def test_a_piece_that_does_not_continue_what_was_told_is_not_for_the_reader() -> None:
    """Given a server that lost the last second of its data, pieces overlap; or some are missing."""
    reader = told(*make_deltas(3, 3))
    repeated, ahead = make_deltas(3, start=4)[0], make_deltas(1, start=9)[0]
    assert not reader.take(repeated)
    assert not reader.take(ahead)
    assert list(reader.rest(whole(0, 8))) == list(make_deltas(2, start=6))


def test_a_result_that_contradicts_what_was_told_is_told_from_its_beginning() -> None:
    (rest,) = told(*make_deltas(3)).rest(whole(1, 5))
    assert rest == Delta(index=0, token_ids=(1, 2, 3, 4), text=text_of(1, 5), restart=True)


def test_so_is_one_that_has_less_than_was_told() -> None:
    (rest,) = told(*make_deltas(4)).rest(whole(0, 2))
    assert rest == Delta(index=0, token_ids=(0, 1), text=text_of(0, 2), restart=True)


def test_one_contradicted_generation_makes_all_void_and_only_the_first_piece_says_so() -> None:
    first, second = (
        make_deltas(2)[0],
        make_deltas(2, start=10)[0].model_copy(update={"choice": 1, "index": 2}),
    )
    other = Choice(index=1, text=text_of(20, 22), token_ids=(20, 21))
    rest = list(told(first, second).rest(whole(0, 2).model_copy(update={"alternatives": (other,)})))
    assert [(delta.choice, delta.restart, delta.token_ids) for delta in rest] == [
        (0, True, (0, 1)),
        (1, False, (20, 21)),
    ]


def test_a_failure_without_a_generation_contradicts_nothing() -> None:
    failed = make_result("a", "", status=Status.FAILED)
    assert list(told(*make_deltas(3)).rest(failed)) == []


def test_restart_is_on_the_wire_only_where_it_is_true() -> None:
    assert "restart" not in Delta(index=0, text="x").to_wire()
    assert Delta.from_wire(Delta(index=0, restart=True).to_wire()).restart
