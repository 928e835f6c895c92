"""The KV cache: one tensor for all layers, so that a block is one contiguous piece of memory."""

from __future__ import annotations

import weakref
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

    def allocate_swap_space(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Blocks like those of the cache in CPU memory, for a model on `device`.

        For a GPU they are pinned, which takes all of the memory now; otherwise untouched ones cost none.

        Raises:
            RuntimeError: if there is not so much memory.
        """
        swap_space = self.allocate(num_blocks, torch.device("cpu"))
        if device.type == "cuda" and num_blocks:
            _pin(swap_space)
        return swap_space


def copy_blocks(target: torch.Tensor, source: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks `(source index, target index)`, adjacent ones in one piece.

    Raises:
        RuntimeError: if there is no such block.
    """
    for source_start, target_start, length in contiguous_runs(pairs):
        target.narrow(0, target_start, length).copy_(
            source.narrow(0, source_start, length), non_blocking=True
        )


def contiguous_runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Group `(source, target)` pairs into as few `(source, target, length)` runs as there can be.

    Both indices advance together in a run, so all its pairs have the same distance between them.
    """
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair[0])):
        if runs:
            first_source, first_target, length = runs[-1]
            if source == first_source + length and target == first_target + length:
                runs[-1] = (first_source, first_target, length + 1)
                continue
        runs.append((source, target, 1))
    return runs


def _pin(tensor: torch.Tensor) -> None:
    """Lock the pages of a CPU tensor for as long as it lives, so that a GPU copies them by itself.

    In place: torch's own pinned memory comes in powers of two, 8 GiB for 4.1.
    """
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    weakref.finalize(tensor, cudart.cudaHostUnregister, tensor.data_ptr())
