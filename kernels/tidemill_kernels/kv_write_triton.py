"""KV write for CUDA tensors, in Triton. The definition is in `kv_write`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_layers", "layer"])  # type: ignore[untyped-decorator]  # triton has no types
def write_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    kv_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_layers: tl.tensor,
    layer: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program per token; WIDTH, a power of two, covers all its heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    i = tl.arange(0, WIDTH)
    wanted = i < NUM_KV_HEADS * HEAD_DIM
    head_floats: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    layer_floats: tl.constexpr = 2 * NUM_KV_HEADS * head_floats
    base = (slot // BLOCK_SIZE * num_layers + layer) * layer_floats + (slot % BLOCK_SIZE) * HEAD_DIM
    target = kv_cache_ptr + base + (i // HEAD_DIM) * head_floats + i % HEAD_DIM
    source = token * (NUM_KV_HEADS * HEAD_DIM) + i
    tl.store(target, tl.load(key_ptr + source, mask=wanted), mask=wanted)
    value = tl.load(value_ptr + source, mask=wanted)
    tl.store(target + NUM_KV_HEADS * head_floats, value, mask=wanted)


def launch_constants(kv_cache: Tensor) -> dict[str, Any]:
    """The kernel's constants and launch options for a model's shape and type."""
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    width = triton.next_power_of_2(num_kv_heads * head_dim)
    bytes_per_warp = 32 * 16  # the widest access of each thread
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "WIDTH": width,
        "num_warps": min(max(width * kv_cache.element_size() // bytes_per_warp, 1), 8),
    }


def kv_write(key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
    """See `tidemill_kernels.kv_write.kv_write`. Never waits for the device."""
    if slots.shape[0] == 0:
        return
    with torch.cuda.device_of(key):
        write_kernel[(slots.shape[0],)](
            key, value, kv_cache, slots, kv_cache.shape[1], layer, **launch_constants(kv_cache)
        )
