"""What a reader of a stream has been told, and what the result adds to it."""

from __future__ import annotations

import pytest

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


NOTHING_IS_LEFT = [Delta(index=0, restart=True)]


def test_of_what_is_void_nothing_stays_though_there_is_nothing_in_its_place() -> None:
    failed = make_result("a", "", status=Status.FAILED)
    reader = told(*make_deltas(3))
    reader.begin_anew()
    assert list(reader.rest(failed)) == NOTHING_IS_LEFT
    assert list(reader.rest(failed)) == []


def test_a_restart_that_a_piece_has_told_is_not_told_again() -> None:
    failed = make_result("a", "", status=Status.FAILED)
    (old,), (new,) = make_deltas(5), make_deltas(2, start=40)
    reader = told(old)
    reader.begin_anew()
    assert reader.take(restarted(new, index=0))
    assert list(reader.rest(failed)) == []


def test_a_restart_before_anything_was_told_is_none_to_the_reader() -> None:
    reader = told()
    reader.begin_anew()
    other = Choice(index=1, text=text_of(20, 22), token_ids=(20, 21))
    rest = reader.rest(whole(0, 3).model_copy(update={"alternatives": (other,)}))
    assert [(piece.index, piece.restart) for piece in rest] == [(0, False), (3, False)]


@pytest.mark.parametrize("lost", [False, True], ids=["first piece missing", "restart missing"])
def test_the_new_generation_is_never_spliced_to_the_old_one(lost: bool) -> None:
    """Given a server that lost the first new piece, the next one may have the number that is awaited."""
    (old,), (new,) = make_deltas(5), make_deltas(2, start=40)
    reader = told(old)
    if lost:
        reader.begin_anew()
    else:
        assert not reader.take(restarted(new, index=3))
    assert not reader.take(new.model_copy(update={"index": 5}))
    (rest,) = reader.rest(whole(38, 45))
    assert (rest.index, rest.restart, rest.text) == (0, True, text_of(38, 45))


def test_a_success_without_tokens_leaves_nothing_of_what_was_told() -> None:
    assert list(told(*make_deltas(3)).rest(whole(0, 0))) == NOTHING_IS_LEFT


def test_a_result_with_less_text_is_told_from_its_beginning() -> None:
    short = make_result("a", "0 ", token_ids=(0, 1, 2))
    (rest,) = told(*make_deltas(3)).rest(short)
    assert (rest.restart, rest.text, rest.token_ids) == (True, "0 ", (0, 1, 2))


def test_restart_is_on_the_wire_only_where_it_is_true() -> None:
    assert "restart" not in Delta(index=0, text="x").to_wire()
    assert Delta.from_wire(Delta(index=0, restart=True).to_wire()).restart
