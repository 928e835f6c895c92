"""Store the keys and values of new tokens in their slots of the paged KV cache.

Shapes (T tokens, G KV heads, D wide):

    key, value  [T, G, D]
    kv_cache    [num_blocks, num_layers, 2, G, block_size, D]
    slots       [T] int64: block * block_size + offset in the block
"""

from __future__ import annotations

import torch
from torch import Tensor


def kv_write(key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
    """Copy row t of `key` and `value` to slot `slots[t]` of `layer`; nothing else is touched.

    CPU tensors are float32; CUDA tensors are float16, bfloat16 or float32. All are contiguous.
    Slots are trusted: whether they lie in the cache is not checked.

    Raises:
        TypeError: a tensor has the wrong type.
        ValueError: a tensor has the wrong shape, is not contiguous, or `layer` does not exist.
    """
    _check(key, value, kv_cache, layer, slots)
    if key.is_cuda:
        from tidemill_kernels.kv_write_triton import kv_write as write
    else:
        from tidemill_kernels.kv_write_cpu import kv_write as write
    write(key, value, kv_cache, layer, slots)


def kv_write_reference(key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
    """The definition, one token at a time."""
    block_size = kv_cache.shape[4]
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        kv_cache[block, layer, 0, :, offset] = key[token]
        kv_cache[block, layer, 1, :, offset] = value[token]


def _check(key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
    if not key.is_cuda and key.dtype != torch.float32:
        raise TypeError(f"KV write on {key.device} takes float32, not {key.dtype}")
    if not key.dtype == value.dtype == kv_cache.dtype:
        raise TypeError(f"key is {key.dtype}, value {value.dtype}, kv_cache {kv_cache.dtype}")
    if slots.dtype != torch.int64:
        raise TypeError(f"slots are int64, not {slots.dtype}")
    if not all(tensor.is_contiguous() for tensor in (key, value, kv_cache, slots)):
        raise ValueError("a tensor is not contiguous")
    _, num_layers, two, num_kv_heads, _, head_dim = kv_cache.shape
    rows = (slots.shape[0], num_kv_heads, head_dim)
    if two != 2 or key.shape != rows or value.shape != rows:
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)}, kv_cache {tuple(kv_cache.shape)} and"
            f" slots {tuple(slots.shape)} do not fit together"
        )
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} of a cache of {num_layers} layers")
