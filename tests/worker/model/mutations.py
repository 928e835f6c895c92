"""Faults that the comparison with transformers must notice, each as a change of our own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tidemill_worker.model import attention, runner
from tidemill_worker.model.batch import PagedBatch

Mutation = Callable[[pytest.MonkeyPatch], None]


def zero_attention(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "paged_attention", lambda query, *_, **__: torch.zeros_like(query))


def shift_positions(patch: pytest.MonkeyPatch) -> None:
    """All tokens but a sequence's first one position later (a shift of all would be no change)."""
    _change_batch(
        patch, lambda batch: replace(batch, positions=batch.positions + (batch.positions > 0).long())
    )


def drop_last_key(patch: pytest.MonkeyPatch) -> None:
    """Decoding rows do not see their own key."""
    original = attention.paged_attention

    def dropped(query: torch.Tensor, kv_cache: torch.Tensor, layer: int, *rest: Any, scale: float) -> Any:
        query_starts, context_lens, block_tables = rest
        decoding = (query_starts[1:] - query_starts[:-1] == 1) & (context_lens > 1)
        return original(
            query, kv_cache, layer, query_starts, context_lens - decoding.int(), block_tables, scale=scale
        )

    patch.setattr(attention, "paged_attention", dropped)


def mix_up_block_tables(patch: pytest.MonkeyPatch) -> None:
    """Each sequence reads its neighbour's blocks; what it writes goes to the right ones."""
    _change_batch(patch, lambda batch: replace(batch, block_tables=batch.block_tables.roll(1, 0)))


def _change_batch(patch: pytest.MonkeyPatch, change: Callable[[PagedBatch], PagedBatch]) -> None:
    original = runner.build_batch
    patch.setattr(runner, "build_batch", lambda *arguments: change(original(*arguments)))


MUTATIONS: dict[str, Mutation] = {
    "attention zeroed": zero_attention,
    "positions +1": shift_positions,
    "last key dropped": drop_last_key,
    "wrong block table": mix_up_block_tables,
}
