"""The mask thread: order, faults, and a mask that never comes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from tidemill_worker.mask_thread import MaskThread


class Wanted:
    """A grammar whose mask is whatever `work` does."""

    def __init__(self, work: Callable[[], object] = lambda: None) -> None:
        self.ready = threading.Event()
        self.error: str | None = None
        self._work = work

    def compute(self) -> None:
        self._work()
        self.ready.set()

    def fail(self, reason: str) -> None:
        self.error = reason
        self.ready.set()


@pytest.fixture
def masks() -> Iterator[MaskThread]:
    masks = MaskThread(patience=0.05)
    yield masks
    masks.close()


def test_masks_are_computed_in_the_order_in_which_they_are_asked_for(masks: MaskThread) -> None:
    order: list[int] = []
    wanted = [Wanted(lambda number=number: order.append(number)) for number in range(20)]
    for one in wanted:
        masks.submit(one)
    masks.wait(wanted[-1].ready)
    assert order == list(range(20))


def test_a_mask_that_cannot_be_computed_fails_its_grammar_alone(masks: MaskThread) -> None:
    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic("index out of bounds")

    broken, good = Wanted(panic), Wanted()
    masks.submit(broken)
    masks.submit(good)
    masks.wait(broken.ready)
    masks.wait(good.ready)
    assert broken.error is not None
    assert "index out of bounds" in broken.error
    assert good.error is None


def test_a_mask_that_never_comes_fails_its_grammar_and_holds_up_no_other(masks: MaskThread) -> None:
    release = threading.Event()
    stuck, behind = Wanted(release.wait), Wanted()
    masks.submit(stuck)
    masks.submit(behind)
    masks.wait(behind.ready)  # whoever waits finds out, not only the one that is stuck
    masks.wait(stuck.ready)
    assert behind.error is None
    assert stuck.error is not None
    assert "0.05 s" in stuck.error
    release.set()


def test_a_slow_mask_is_waited_for_if_others_are_done_meanwhile(masks: MaskThread) -> None:
    turn = threading.Event()
    many = [Wanted(lambda: turn.wait(0.01)) for _ in range(20)]
    for one in many:
        masks.submit(one)
    masks.wait(many[-1].ready)  # longer than anybody's patience, but nobody is stuck
    assert [one.error for one in many] == [None] * 20


def test_a_grammar_that_nobody_needs_any_more_is_let_go(masks: MaskThread) -> None:
    done = Wanted()
    gone = threading.Event()
    weakref.finalize(done, gone.set)
    masks.submit(done)
    masks.wait(done.ready)
    del done
    assert gone.wait(10)
