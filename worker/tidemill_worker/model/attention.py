"""Tidemill's attention as a transformers attention implementation.

A model loaded with `attn_implementation="tidemill"` calls `paged_forward` in every layer with the
keys and values of this step's tokens only; the older ones are read from the KV cache through the
block tables. The step's metadata and the cache arrive as the keyword `paged` of the model's
forward call, which transformers hands down to the attention unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from tidemill_kernels.kv_write import kv_write
from tidemill_kernels.paged_attention import paged_attention
from tidemill_worker.model.batch import PagedBatch

IMPLEMENTATION = "tidemill"


def register_attention() -> None:
    """Make `attn_implementation="tidemill"` known to transformers. Safe to call again."""
    AttentionInterface.register(IMPLEMENTATION, paged_forward)


def paged_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    paged: PagedBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write this step's keys and values, then attend over the cache.

    Args:
        module: the attention layer; its `layer_idx` chooses the cache's layer.
        query: `[1, num_heads, num_tokens, head_dim]`, rows of all sequences packed.
        key: `[1, num_kv_heads, num_tokens, head_dim]`.
        value: as `key`.
        attention_mask: always `None`: causality lies in the positions.
        scaling: factor on the products of queries and keys.
        paged: metadata of the step, and the cache.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and no weights.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int in every transformers model
    kv_write(_packed(key), _packed(value), paged.kv_cache, layer, paged.slots)
    output = paged_attention(
        _packed(query),
        paged.kv_cache,
        layer,
        paged.query_starts,
        paged.context_lens,
        paged.block_tables,
        scale=scaling,
    )
    return output.unsqueeze(0), None


def _packed(states: torch.Tensor) -> torch.Tensor:
    """`[1, heads, tokens, dim]` to contiguous `[tokens, heads, dim]`; mostly a view."""
    return states[0].transpose(0, 1).contiguous()
