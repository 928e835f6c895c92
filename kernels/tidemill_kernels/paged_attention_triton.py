"""Paged attention for CUDA tensors, in Triton. The definition is in `paged_attention`.

One program takes a tile of neighbouring rows of one sequence under one KV head: rows times the query
heads of that head's group fill the 16 rows of a tensor core's product, so a decode row with a group
of 3 wastes less than it would alone, and keys are loaded once for the tile. Keys come in tiles at
absolute positions with an online softmax across them (Dao et al. 2022), looked up through the block
table; those before the windows of all rows are skipped. What a model does without (window, softcap,
sinks) is None, which is a constant to Triton, and its kernel has no trace of it. How tiles are numbered
without knowing the lengths on the host is vLLM's idea (its unified attention): those of sequence s begin
at query_starts[s] // TILE + s, and some numbers stay unused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(math.log2(math.e))  # scores are kept in units of which one doubles a weight
LOWEST = tl.constexpr(-3e38)  # below every score, and finite: less itself it is 0


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _tanh(x: tl.tensor) -> tl.tensor:
    """By exp(-2 |x|), which cannot overflow; near 0, where 1 - exp loses places, by its series."""
    magnitude = tl.abs(x)
    square = x * x
    near = magnitude + magnitude * square * (square * (2 / 15) - 1 / 3)
    e = tl.exp2(magnitude * (-2 * LOG2_E))
    result = tl.where(magnitude < 0.1, near, (1 - e) / (1 + e))
    return tl.where(x < 0, -result, result)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sequence_of(
    query_starts_ptr: tl.tensor, num_sequences: tl.tensor, tile: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """The last sequence whose tiles begin at or before this one."""
    sequence, past = 0, num_sequences
    while past - sequence > 1:
        middle = (sequence + past) // 2
        if tl.load(query_starts_ptr + middle) // TILE + middle <= tile:
            sequence = middle
        else:
            past = middle
    return sequence


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _places(
    start: tl.tensor,
    num_rows: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    in_tile: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the pairs stand in `query` and `out`, and which of these places exist."""
    d = tl.arange(0, WIDTH)
    places = (((start + row).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM)[:, None] + d[None, :]
    return places, (in_tile & (row < num_rows))[:, None] & (d < HEAD_DIM)[None, :]


@triton.jit(  # type: ignore[untyped-decorator]  # triton has no types
    do_not_specialize=["scale", "softcap", "window", "num_sequences", "max_blocks", "num_layers", "layer"]
)
def attention_kernel(  # noqa: PLR0915 - Triton inlines all; halves would pass twenty values on
    query_ptr: tl.tensor,
    kv_cache_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor | None,
    scale: tl.tensor,
    softcap: tl.tensor | None,
    window: tl.tensor | None,
    num_sequences: tl.tensor,
    max_blocks: tl.tensor,
    num_layers: tl.tensor,
    layer: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """ROWS (row, head) pairs and KEYS keys at a time, WIDTH >= HEAD_DIM; all powers of two >= 16.

    `scale` leads to scores with base 2, or without a base what is capped: `softcap` has base 2 then.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TILE: tl.constexpr = ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    sequence = _sequence_of(query_starts_ptr, num_sequences, tile, TILE)
    start = tl.load(query_starts_ptr + sequence)
    num_rows = tl.load(query_starts_ptr + sequence + 1) - start
    first_row = (tile - (start // TILE + sequence)) * TILE
    if first_row >= num_rows:
        return

    pair = tl.arange(0, ROWS)
    row = first_row + pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    d = tl.arange(0, WIDTH)
    in_width = d < HEAD_DIM
    in_tile = pair < TILE * GROUP
    places, is_real = _places(start, num_rows, row, head, in_tile, WIDTH, NUM_HEADS, HEAD_DIM)
    query = tl.load(query_ptr + places, mask=is_real, other=0.0)

    before = tl.load(context_lens_ptr + sequence) - num_rows  # tokens before this step's
    end = before + tl.minimum(first_row + TILE, num_rows)
    head_floats: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    layer_floats: tl.constexpr = 2 * NUM_KV_HEADS * head_floats
    keys_ptr = kv_cache_ptr + tl.cast(layer, tl.int64) * layer_floats + kv_head * head_floats
    table_ptr = block_tables_ptr + tl.cast(sequence, tl.int64) * max_blocks

    maximum = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:  # the first score, so to speak
        sink = tl.load(sinks_ptr + head, mask=in_tile, other=0.0) * LOG2_E
        maximum = tl.maximum(maximum, sink)
        total = tl.exp2(sink - maximum)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    begin = 0
    if window is not None:
        begin = tl.maximum(before + first_row + 1 - window, 0)
    for first_key in range(begin // KEYS * KEYS, end, KEYS):
        position = first_key + tl.arange(0, KEYS)
        exists = position < end
        if window is not None:
            exists = exists & (position >= begin)
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        slot = block * num_layers * layer_floats + (position % BLOCK_SIZE) * HEAD_DIM
        # What lies in slots that no row of the tile sees may be NaN: it is not loaded.
        wanted = exists[:, None] & in_width[None, :]
        key = tl.load(keys_ptr + slot[:, None] + d[None, :], mask=wanted, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if softcap is not None:
            scores = _tanh(scores) * softcap
        seen = position[None, :] <= (before + row)[:, None]
        if window is not None:
            seen = seen & (position[None, :] > (before + row - window)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        factor = tl.exp2(maximum - new_maximum)
        value_ptr = keys_ptr + NUM_KV_HEADS * head_floats
        value = tl.load(value_ptr + slot[:, None] + d[None, :], mask=wanted, other=0.0)
        total = total * factor + tl.sum(weights, 1)
        result = result * factor[:, None]
        result = tl.dot(weights.to(value.dtype), value, result, input_precision=PRECISION)
        maximum = new_maximum
    result = result / total[:, None]
    if WIDTH > 128:
        # Computed again, from loads that the compiler cannot merge with the first: kept all the while,
        # they would cost registers, which float32 has none left of.
        start = tl.load(query_starts_ptr + sequence)
        num_rows = tl.load(query_starts_ptr + sequence + 1) - start
        places, is_real = _places(start, num_rows, row, head, in_tile, WIDTH, NUM_HEADS, HEAD_DIM)
    tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=is_real)


def launch_numbers(scale: float, window: int | None, softcap: float | None) -> dict[str, float | int | None]:
    """The kernel's `scale`, `softcap` and `window` for those of the definition."""
    return {
        "scale": scale / softcap if softcap else scale * math.log2(math.e),
        "softcap": softcap * math.log2(math.e) if softcap else None,
        "window": min(window, 2**31 - 1) if window else None,
    }


def launch_constants(num_heads: int, kv_cache: Tensor) -> dict[str, Any]:
    """The kernel's constants and launch options for a model's shape and type."""
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    width = max(triton.next_power_of_2(head_dim), 16)
    # As many keys, and for float32 as many threads, as need no more registers than there are.
    exact = kv_cache.dtype == torch.float32
    keys = (2048 if exact else 8192) // width
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "ROWS": max(triton.next_power_of_2(num_heads // num_kv_heads), 16),
        "KEYS": min(max(keys, 16), 64),
        "WIDTH": width,
        "PRECISION": "tf32x3",  # three products, which keep the accuracy of float32
        "num_warps": 8 if exact else 4,
        "num_stages": 2,
    }


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """See `tidemill_kernels.paged_attention.paged_attention`. Never waits for the device."""
    num_tokens, num_heads, _ = query.shape
    num_sequences, max_blocks = block_tables.shape
    if num_tokens == 0:
        return
    constants = launch_constants(num_heads, kv_cache)
    tile = constants["ROWS"] // (num_heads // constants["NUM_KV_HEADS"])
    grid = (num_tokens // tile + num_sequences, constants["NUM_KV_HEADS"])
    with torch.cuda.device_of(query):
        attention_kernel[grid](
            query,
            kv_cache,
            query_starts,
            context_lens,
            block_tables,
            out,
            sinks,
            num_sequences=num_sequences,
            max_blocks=max_blocks,
            num_layers=kv_cache.shape[1],
            layer=layer,
            **launch_numbers(scale, window, softcap),
            **constants,
        )
