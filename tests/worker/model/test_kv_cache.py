from __future__ import annotations

import torch

from tests.worker.model.factories import CPU
from tidemill_worker.model.kv_cache import KVCacheSpec, contiguous_runs, copy_blocks
from tidemill_worker.model.survey import AttentionLayer

SPEC = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)


def test_sizes_are_those_of_smollm2() -> None:
    assert SPEC.bytes_per_token == 30 * 2 * 3 * 64 * 4 == 46_080
    assert SPEC.num_blocks_in(2**30) == 2**30 // (16 * 46_080) == 1456
    assert SPEC.allocate(2, CPU).shape == (2, 30, 2, 3, 16, 64)


def make_layer(*, key_dim: int = 8, value_dim: int = 8, window: int | None = None) -> AttentionLayer:
    return AttentionLayer(
        module="Attention",
        num_heads=4,
        num_kv_heads=2,
        key_dim=key_dim,
        value_dim=value_dim,
        window=window,
        softcap=None,
        has_sinks=False,
    )


def test_the_widest_of_keys_and_values_decides() -> None:
    layers = [make_layer(), make_layer(key_dim=24, value_dim=16), make_layer(value_dim=12, window=7)]
    spec = KVCacheSpec.for_layers(layers, block_size=4, dtype=torch.float32)
    assert spec.allocate(2, CPU).shape == (2, 3, 2, 2, 4, 24)


def test_runs_advance_on_both_sides() -> None:
    assert contiguous_runs([]) == []
    assert contiguous_runs([(5, 9)]) == [(5, 9, 1)]
    assert contiguous_runs([(3, 8), (1, 6), (2, 7)]) == [(1, 6, 3)]
    assert contiguous_runs([(1, 6), (2, 8), (3, 9)]) == [(1, 6, 1), (2, 8, 2)]


def test_copies_move_whole_blocks_and_nothing_else() -> None:
    source = torch.arange(6.0).view(6, 1).expand(6, 4).contiguous()
    target = torch.full((6, 4), -1.0)
    copy_blocks(target, source, [(4, 0), (5, 1), (2, 5)])
    assert target[:, 0].tolist() == [4, 5, -1, -1, -1, 2]
