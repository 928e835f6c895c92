"""The KV cache: one tensor for all layers, so that a block is one contiguous piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidemill_worker.model.survey import AttentionLayer


@dataclass(frozen=True)
class KVCacheSpec:
    """The shape of one block: `[layer, 2 (key, value), kv_head, token, dim]`.

    There is one group of blocks for all layers: a layer with a sliding window keeps the keys that
    have left it, and the widest of all keys and values decides over the width of the others.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def for_layers(
        cls, layers: Sequence[AttentionLayer], *, block_size: int, dtype: torch.dtype
    ) -> KVCacheSpec:
        """The cache of a model that `survey` found to have these layers."""
        return cls(
            num_layers=len(layers),
            num_kv_heads=layers[0].num_kv_heads,
            head_dim=max(max(layer.key_dim, layer.value_dim) for layer in layers),
            block_size=block_size,
            dtype=dtype,
        )

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def num_blocks_in(self, memory: int) -> int:
        """How many blocks fit in `memory` bytes."""
        return memory // self.bytes_per_block

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Zeroed pages `[num_blocks, layer, 2, kv_head, token, dim]`; untouched ones cost no memory."""
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=device)


def copy_blocks(target: torch.Tensor, source: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks `(source index, target index)`, adjacent ones in one piece."""
    for source_start, target_start, length in contiguous_runs(pairs):
        target[target_start : target_start + length].copy_(
            source[source_start : source_start + length], non_blocking=True
        )


def contiguous_runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Group `(source, target)` pairs into `(source, target, length)` runs that advance together."""
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(pairs):
        if runs:
            first_source, first_target, length = runs[-1]
            if source == first_source + length and target == first_target + length:
                runs[-1] = (first_source, first_target, length + 1)
                continue
        runs.append((source, target, 1))
    return runs
