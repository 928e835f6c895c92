"""KV write for CPU tensors, compiled by numba. The definition is in `kv_write`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tidemill_kernels.jit import Floats, compiled


def kv_write(key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
    """See `tidemill_kernels.kv_write.kv_write`."""
    _write(key.numpy(), value.numpy(), kv_cache.numpy(), layer, slots.numpy())


@compiled
def _write(key: Floats, value: Floats, kv_cache: Floats, layer: int, slots: NDArray[np.int64]) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    block_size = kv_cache.shape[4]
    for token in range(num_tokens):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_kv_heads):
            for d in range(head_dim):
                kv_cache[block, layer, 0, head, offset, d] = key[token, head, d]
                kv_cache[block, layer, 1, head, offset, d] = value[token, head, d]
