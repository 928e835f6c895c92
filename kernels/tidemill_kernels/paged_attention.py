"""Causal attention over a paged KV cache, for prefill and decode rows alike.

`paged_attention` picks the kernel by the device of its tensors; `paged_attention_reference` is the
plain definition that both kernels are tested against.

Shapes (T query rows of S sequences, H heads over G KV heads, D wide):

    query, out      [T, H, D]
    kv_cache        [num_blocks, num_layers, 2, G, block_size, D]      0 = keys, 1 = values
    query_starts    [S + 1] int32   rows of sequence s: query_starts[s] .. query_starts[s + 1] - 1
    context_lens    [S] int32       tokens of s in the cache, those of this step included
    block_tables    [S, max_blocks] int32
    sinks           [H] float32

The rows of a sequence are its last positions, consecutive. A row at position p attends to the keys
at positions 0 to p, or p - window + 1 to p if there is a window. The slots of other positions are
never read, nor are table entries that name blocks of such slots only.

The weights of a row are softmax(softcap * tanh(scale * query . key / softcap)), without softcap
softmax(scale * query . key). A head's sink is one more logit in that softmax, which is neither scaled
nor capped and has no value: the weights of the keys then add up to less than 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every query row over its own sequence's keys and values; returns `out`.

    CPU tensors are float32; CUDA tensors are float16, bfloat16 or float32. All are contiguous.
    A row's result depends, to the bit, on its own query, keys and values only. On CUDA, a value of its
    sequence that is NaN or infinite reaches it too if a row of the same tile sees it.

    Block ids and lengths are trusted: what they point at outside the cache is not checked.

    Raises:
        TypeError: a tensor has the wrong type.
        ValueError: a tensor has the wrong shape, is not contiguous, `layer` does not exist, or
            `window` or `softcap` is not positive.
    """
    if out is None:
        out = torch.empty_like(query)
    _check(query, kv_cache, layer, query_starts, context_lens, block_tables, out)
    _check_options(query, window, softcap, sinks)
    if query.is_cuda:
        from tidemill_kernels.paged_attention_triton import paged_attention as attend
    else:
        from tidemill_kernels.paged_attention_cpu import paged_attention as attend
    attend(
        query,
        kv_cache,
        layer,
        query_starts,
        context_lens,
        block_tables,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        out=out,
    )
    return out


def paged_attention_reference(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The definition, row by row, computed and returned in `dtype`."""
    block_size = kv_cache.shape[4]
    group = query.shape[1] // kv_cache.shape[3]
    out = torch.empty(query.shape, dtype=dtype, device=query.device)
    no_sinks = torch.full((query.shape[1],), -torch.inf)
    sink = (no_sinks if sinks is None else sinks).to(query.device, dtype).unsqueeze(1)
    starts = query_starts.tolist()
    for sequence, context_len in enumerate(context_lens.tolist()):
        num_rows = starts[sequence + 1] - starts[sequence]
        for row in range(num_rows):
            length = context_len - num_rows + row + 1
            first = 0 if window is None else max(length - window, 0)
            positions = torch.arange(first, length, device=query.device)
            blocks = block_tables[sequence].long()[positions // block_size]
            keys, values = kv_cache[blocks, layer, :, :, positions % block_size].to(dtype).unbind(1)
            token = starts[sequence] + row
            scores = torch.einsum("hd,thd->ht", query[token].to(dtype), keys.repeat_interleave(group, 1))
            scores *= scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.softmax(torch.cat([scores, sink], dim=1), dim=-1)[:, :-1]
            out[token] = torch.einsum("ht,thd->hd", weights, values.repeat_interleave(group, 1))
    return out


def _check(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    out: Tensor,
) -> None:
    if not query.is_cuda and query.dtype != torch.float32:
        raise TypeError(f"attention on {query.device} takes float32, not {query.dtype}")
    if not query.dtype == kv_cache.dtype == out.dtype:
        raise TypeError(f"query is {query.dtype}, kv_cache {kv_cache.dtype}, out {out.dtype}")
    if not query_starts.dtype == context_lens.dtype == block_tables.dtype == torch.int32:
        raise TypeError("query_starts, context_lens and block_tables are int32")
    tensors = (query, kv_cache, query_starts, context_lens, block_tables, out)
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("a tensor is not contiguous")
    _, num_layers, two, num_kv_heads, _, head_dim = kv_cache.shape
    if two != 2 or query.shape[2] != head_dim or query.shape[1] % num_kv_heads or out.shape != query.shape:
        raise ValueError(
            f"query {tuple(query.shape)}, kv_cache {tuple(kv_cache.shape)} and out {tuple(out.shape)}"
            " do not fit together"
        )
    num_sequences = context_lens.shape[0]
    if query_starts.shape != (num_sequences + 1,) or block_tables.shape[0] != num_sequences:
        raise ValueError(
            f"query_starts {tuple(query_starts.shape)}, context_lens {tuple(context_lens.shape)} and"
            f" block_tables {tuple(block_tables.shape)} are not of the same sequences"
        )
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} of a cache of {num_layers} layers")


def _check_options(query: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} keys")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"a softcap of {softcap}")
    if sinks is None:
        return
    if sinks.dtype != torch.float32:
        raise TypeError(f"sinks are float32, not {sinks.dtype}")
    if sinks.shape != query.shape[1:2] or sinks.device != query.device or not sinks.is_contiguous():
        raise ValueError(
            f"sinks {tuple(sinks.shape)} on {sinks.device} do not fit query {tuple(query.shape)} on"
            f" {query.device}, or are not contiguous"
        )
