"""Compile the CPU kernels and see that they run here, without a model."""

from __future__ import annotations

import numpy as np
import torch

from tidemill_kernels.activations import silu
from tidemill_kernels.choose_tokens import ROW, choose_tokens, scratch_bytes
from tidemill_kernels.kv_write import kv_write
from tidemill_kernels.paged_attention import paged_attention
from tidemill_kernels.rank_tokens import rank_tokens


def warm_up(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Run each CPU kernel once. (A worker does so with its model: it rehearses a generation.)"""
    key = torch.zeros(1, num_kv_heads, head_dim)
    kv_cache = torch.zeros(1, 1, 2, num_kv_heads, block_size, head_dim)
    kv_write(key, key, kv_cache, 0, torch.zeros(1, dtype=torch.int64))
    paged_attention(
        torch.zeros(1, num_heads, head_dim),
        kv_cache,
        0,
        torch.tensor([0, 1], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        scale=1.0,
    )
    silu(torch.zeros(1))
    logits = torch.zeros(1)
    row = np.zeros(1, ROW)
    row["logits"], row["temperature"], row["top_p"] = logits.data_ptr(), 1, 1
    choose_tokens(row, 1, np.empty(scratch_bytes(1) // 8 * torch.get_num_threads(), np.int64))
    rank_tokens(row["logits"].copy(), np.zeros(1, np.int64), vocabulary=1, num_top=1)
