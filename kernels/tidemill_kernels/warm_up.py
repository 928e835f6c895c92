"""Compile the CPU kernels and see that they run here, without a model."""

from __future__ import annotations

import numpy as np
import torch

from tidemill_kernels.gumbel_argmax import gumbel_argmax
from tidemill_kernels.kv_write import kv_write
from tidemill_kernels.paged_attention import paged_attention
from tidemill_kernels.silu import silu


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
    gumbel_argmax(np.zeros(1, np.float32), np.zeros(1, np.int64), np.uint64(0), choice=0, index=0)
