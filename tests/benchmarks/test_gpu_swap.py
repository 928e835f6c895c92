"""The GPU's check of swaps, tried on the CPU: equal rounds are equal, and a block gone astray is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from gpu_swap import Outcome, Rounds, fault

from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.model.swapper import DirectSwapper

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=2, dtype=torch.float16)


Pairs = Sequence[tuple[int, int]]
Swap = Callable[[DirectSwapper, Pairs], None]


def run() -> Outcome:
    rounds = Rounds(SPEC, torch.device("cpu"), num_blocks=12, num_swap_blocks=8)
    return rounds.run(3, 5, between=lambda: None)


def nothing(swapper: DirectSwapper, pairs: Pairs) -> None:
    """A swap that copies nothing."""


def crossed(swap: Swap) -> Swap:
    """A swap whose blocks arrive in one another's places."""

    def cross(swapper: DirectSwapper, pairs: Pairs) -> None:
        sources, targets = zip(*pairs, strict=True)
        swap(swapper, list(zip(sources, reversed(targets), strict=True)))

    return cross


def test_equal_rounds_have_equal_checksums_and_different_ones_do_not() -> None:
    first, second = run(), run()
    assert fault(first, second) is None
    checksums = [*first.arrived, *first.memory]
    assert len(set(checksums)) == len(checksums) == 3 + 2


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("swap_out", nothing),
        ("swap_in", nothing),
        ("swap_out", crossed(DirectSwapper.swap_out)),
        ("swap_in", crossed(DirectSwapper.swap_in)),
    ],
    ids=["none left", "none came", "crossed on leaving", "crossed on coming"],
)
def test_a_swap_that_is_wrong_each_time_is_noticed(
    name: str, broken: Swap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the same fault whether the device is idle or busy, then that both are equal says nothing."""
    monkeypatch.setattr(DirectSwapper, name, broken)
    outcome = run()
    assert str(fault(outcome, outcome)).startswith("swapped blocks came back other than they were written")


def test_a_block_that_left_too_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = run()
    swap_in = DirectSwapper.swap_in

    def late(swapper: DirectSwapper, pairs: list[tuple[int, int]]) -> None:
        slot, _ = pairs[0]
        swapper._swap_space[slot].fill_(torch.nan)  # what its block had become meanwhile
        swap_in(swapper, pairs)

    monkeypatch.setattr(DirectSwapper, "swap_in", late)
    busy = run()
    assert all(found != right for found, right in zip(busy.arrived, idle.arrived, strict=True))
    assert fault(idle, busy) == "swapped blocks differ from those that were swapped with the device idle"
