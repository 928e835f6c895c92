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
    """The last token of each row one position later (a shift of all would be no change)."""

    def shifted(batch: PagedBatch) -> PagedBatch:
        positions = batch.positions.clone()
        positions[0, batch.query_starts[1:].long() - 1] += 1
        return replace(batch, positions=positions)

    _change_batch(patch, shifted)


def drop_last_key(patch: pytest.MonkeyPatch) -> None:
    """Decoding rows do not see their own key."""
    original = attention.paged_attention

    def dropped(query: torch.Tensor, kv_cache: torch.Tensor, layer: int, *rest: Any, **options: Any) -> Any:
        query_starts, context_lens, block_tables = rest
        decoding = (query_starts[1:] - query_starts[:-1] == 1) & (context_lens > 1)
        return original(
            query, kv_cache, layer, query_starts, context_lens - decoding.int(), block_tables, **options
        )

    patch.setattr(attention, "paged_attention", dropped)


def mix_up_block_tables(patch: pytest.MonkeyPatch) -> None:
    """Each sequence reads its neighbour's blocks; what it writes goes to the right ones."""
    _change_batch(patch, lambda batch: replace(batch, block_tables=batch.block_tables.roll(1, 0)))


def lift_softcap(patch: pytest.MonkeyPatch) -> None:
    _change_options(patch, lambda options: options | {"softcap": None})


def widen_windows(patch: pytest.MonkeyPatch) -> None:
    """Rows see one key more than their window holds."""
    _change_options(patch, lambda options: options | {"window": options["window"] and options["window"] + 1})


def drop_sinks(patch: pytest.MonkeyPatch) -> None:
    _change_options(patch, lambda options: options | {"sinks": None})


def _change_options(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    original = attention.paged_attention
    patch.setattr(
        attention, "paged_attention", lambda *tensors, **options: original(*tensors, **change(options))
    )


def _change_batch(patch: pytest.MonkeyPatch, change: Callable[[PagedBatch], PagedBatch]) -> None:
    original = runner.build_batch
    patch.setattr(runner, "build_batch", lambda *arguments: change(original(*arguments)))


SOFTCAP_OFF, WINDOW_OFF_BY_ONE, SINKS_DROPPED = "softcap off", "window off by one", "sinks dropped"
MUTATIONS: dict[str, Mutation] = {
    "attention zeroed": zero_attention,
    "positions +1": shift_positions,
    "last key dropped": drop_last_key,
    "wrong block table": mix_up_block_tables,
}
"""Those that concern every model."""
SPECIAL_MUTATIONS: dict[str, Mutation] = {
    SOFTCAP_OFF: lift_softcap,
    WINDOW_OFF_BY_ONE: widen_windows,
    SINKS_DROPPED: drop_sinks,
}
"""Those that concern the models that have such a thing."""
