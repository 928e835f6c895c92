"""The GPU's check of swaps, tried on the CPU: equal rounds are equal, and a block gone astray is seen."""

from __future__ import annotations

import pytest
import torch
from gpu_swap import Rounds

from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.model.swapper import DirectSwapper

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=2, dtype=torch.float16)


def run() -> list[str]:
    rounds = Rounds(SPEC, torch.device("cpu"), num_blocks=12, num_swap_blocks=8)
    return rounds.run(3, 5, between=lambda: None)


def test_equal_rounds_have_equal_checksums_and_different_ones_do_not() -> None:
    first = run()
    assert first == run()
    assert len(set(first)) == len(first) == 3 + 2


def test_a_block_that_left_too_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run()
    swap_in = DirectSwapper.swap_in

    def late(swapper: DirectSwapper, pairs: list[tuple[int, int]]) -> None:
        slot, _ = pairs[0]
        swapper._swap_space[slot].fill_(torch.nan)  # what its block had become meanwhile
        swap_in(swapper, pairs)

    monkeypatch.setattr(DirectSwapper, "swap_in", late)
    assert all(found != right for found, right in zip(run()[:3], expected[:3], strict=True))
