"""Batches for the kernels, with NaN everywhere that a kernel has no business reading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

GUARD = 4096


def guarded(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A contiguous tensor of NaN, with NaN before and after it in the same memory."""
    size = math.prod(shape)
    return torch.full((size + 2 * GUARD,), math.nan, dtype=dtype)[GUARD : GUARD + size].view(*shape)


def guards_hold(tensor: Tensor) -> bool:
    """Whether nothing was written before or after a `guarded` tensor."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return bool(storage[:GUARD].isnan().all() and storage[-GUARD:].isnan().all())


@dataclass(frozen=True)
class Model:
    """The shape of a model's attention."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    num_layers: int = 2
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def sinks(self) -> Tensor | None:
        """From far below the scores of random tokens to above them."""
        return torch.linspace(-4, 4, self.num_heads) if self.has_sinks else None


@dataclass(frozen=True)
class Batch:
    """Arguments of paged attention."""

    query: Tensor
    kv_cache: Tensor
    layer: int
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, int, Tensor, Tensor, Tensor]:
        return (
            self.query,
            self.kv_cache,
            self.layer,
            self.query_starts,
            self.context_lens,
            self.block_tables,
        )

    @property
    def options(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }

    def with_(self, **changes: Tensor | int | float | None) -> Batch:
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tokens:
    """Queries, keys and values of one sequence, position by position."""

    query: Tensor
    key: Tensor
    value: Tensor

    def __len__(self) -> int:
        return len(self.query)


def make_tokens(
    count: int, model: Model, *, seed: int = 0, dtype: torch.dtype = torch.float32, sharp: float = 1.0
) -> Tokens:
    """Random tokens; `sharp` multiplies the queries, so that few keys get most of the weight."""
    generator = torch.Generator().manual_seed(seed)

    def rows(heads: int) -> Tensor:
        return torch.randn(count, heads, model.head_dim, generator=generator)

    tokens = (rows(model.num_heads) * sharp, rows(model.num_kv_heads), rows(model.num_kv_heads))
    return Tokens(*(part.to(dtype) for part in tokens))


def make_batch(
    parts: Sequence[tuple[Tokens, int, int]],
    model: Model,
    *,
    block_size: int = 16,
    seed: int = 0,
) -> Batch:
    """A batch of rows `start` to `stop` - 1 of each (tokens, start, stop).

    Blocks are dealt out in random order. All that is not a key or value of a row's window is NaN:
    other layers, the rest of the first and last block, block 0 (to which unused table entries point,
    those before all windows too), the guards.
    """
    dtype = parts[0][0].query.dtype
    needed = [-(-stop // block_size) for _, _, stop in parts]
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(needed) + 3
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    layer = model.num_layers - 1
    kv_cache = guarded(
        (num_blocks, model.num_layers, 2, model.num_kv_heads, block_size, model.head_dim), dtype
    )
    tables = torch.zeros(len(parts), max(needed) + 2, dtype=torch.int32)
    for sequence, (tokens, start, stop) in enumerate(parts):
        blocks = torch.tensor([free.pop() for _ in range(needed[sequence])])
        seen = 0 if model.window is None else max(start + 1 - model.window, 0)
        tables[sequence, seen // block_size : len(blocks)] = blocks[seen // block_size :]
        positions = torch.arange(seen, stop)
        block, offset = blocks[positions // block_size], positions % block_size
        kv_cache[block, layer, 0, :, offset] = tokens.key[seen:stop]
        kv_cache[block, layer, 1, :, offset] = tokens.value[seen:stop]
    rows = torch.cat([tokens.query[start:stop] for tokens, start, stop in parts])
    query = guarded(rows.shape, dtype)
    query.copy_(rows)
    counts = torch.tensor([0, *(stop - start for _, start, stop in parts)])
    return Batch(
        query=query,
        kv_cache=kv_cache,
        layer=layer,
        query_starts=counts.cumsum(0).int(),
        context_lens=torch.tensor([stop for _, _, stop in parts], dtype=torch.int32),
        block_tables=tables,
        scale=model.scale,
        window=model.window,
        softcap=model.softcap,
        sinks=model.sinks,
    )
