"""Paged attention for CPU tensors, compiled by numba. The definition is in `paged_attention`.

The keys of a row are taken in chunks at absolute positions, with an online softmax across chunks
(Milakov and Gimelshein 2018; Dao et al. 2022). The order of every sum depends on the row's position
alone: products over the head dimension go to 8 lanes in turn, a tree adds the lanes, and keys are
added one after another. So batches, tiles and threads leave no trace in the bits.

Of a chunk, a row takes the keys in its window and touches no other, so that nothing has to be masked;
chunks before the windows of all rows of a tile are skipped. A sink is where a row's softmax begins.

Work is dealt out by tile, some neighbouring rows of one sequence, dearest first, and by KV head
where there are few tiles. In a tile, a chunk of keys and values stays in the cache for all rows.
While the keys are used, their values are prefetched, and with these the next keys: 22 ms instead
of 44 over the 30 layers of SmolLM2, for 32 rows at 300 tokens of context on one core.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numba import types
from numba.np.numpy_support import carray, from_dtype
from numpy.typing import NDArray
from torch import Tensor

from tidemill_kernels import attention_tiles, jit, simd
from tidemill_kernels.attention_tiles import (
    CHUNK,
    MAX_HEADS,
    NOTHING,
    add_values,
    cap_scores,
    exponentiate,
    score_keys,
)
from tidemill_kernels.jit import Floats, Ints, Native, compile_native, compiled, digest, part, pointer, take
from tidemill_kernels.openmp import run_on_threads

_MAX_TILE = 16  # rows of one sequence that share a pass over its keys
_ITEMS_PER_THREAD = 8  # enough that no thread waits long for the last one
_ENDLESS = 2**62  # a window that no context fills
_LOG2_E = math.log2(math.e)  # scores are kept in units of which one doubles a weight

# What a thread is told: addresses and numbers.
_CALL = np.dtype(
    [
        ("query", np.int64),
        ("kv_cache", np.int64),
        ("query_starts", np.int64),
        ("context_lens", np.int64),
        ("block_tables", np.int64),
        ("tiles", np.int64),
        ("next_item", np.int64),
        ("out", np.int64),
        ("sinks", np.int64),  # 0 if there are none
        ("layer", np.int64),
        ("num_tokens", np.int64),
        ("num_heads", np.int64),
        ("head_dim", np.int64),
        ("num_blocks", np.int64),
        ("num_kv_heads", np.int64),
        ("block_size", np.int64),
        ("block_floats", np.int64),
        ("num_sequences", np.int64),
        ("max_blocks", np.int64),
        ("num_tiles", np.int64),
        ("heads_per_item", np.int64),
        ("window", np.int64),
        ("scale", np.float32),
        ("softcap", np.float32),  # in units of the scores; 0 if there is none
    ]
)


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
    """See `tidemill_kernels.paged_attention.paged_attention`."""
    window = min(window or _ENDLESS, _ENDLESS)
    tiles, cost = _plan_tiles(query_starts.numpy(), context_lens.numpy(), window)
    tiles = tiles[np.argsort(-cost)]
    next_item = np.zeros(1, np.int64)
    num_blocks, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    items_wanted = _ITEMS_PER_THREAD * torch.get_num_threads()
    call = np.array(
        (
            query.data_ptr(),
            kv_cache.data_ptr(),
            query_starts.data_ptr(),
            context_lens.data_ptr(),
            block_tables.data_ptr(),
            tiles.ctypes.data,
            next_item.ctypes.data,
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            layer,
            query.shape[0],
            query.shape[1],
            head_dim,
            num_blocks,
            num_kv_heads,
            block_size,
            kv_cache.stride(0),
            *block_tables.shape,
            len(tiles),
            min(max(len(tiles) * num_kv_heads // items_wanted, 1), num_kv_heads),
            window,
            # What is capped is in units of the cap.
            scale / softcap if softcap else scale * _LOG2_E,
            softcap * _LOG2_E if softcap else 0,
        ),
        dtype=_CALL,
    )
    run_on_threads(compile_attention().address, call.ctypes.data)


@functools.cache
def compile_attention() -> Native:
    """What each thread runs: compiled in some 3 s, then kept on disk."""
    sources = digest(simd, jit, attention_tiles)

    def attend(call_pointer: Any) -> None:
        _ = sources
        _attend(call_pointer)

    signature = types.void(types.CPointer(from_dtype(_CALL)))
    return compile_native(signature, attend)


@compiled
def _plan_tiles(
    query_starts: Ints, context_lens: Ints, window: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(sequence, first row, row past the last, keys of the first row) of each tile, and its cost."""
    num_tiles = 0
    for sequence in range(len(context_lens)):
        num_rows = query_starts[sequence + 1] - query_starts[sequence]
        num_tiles += (num_rows + _MAX_TILE - 1) // _MAX_TILE
    tiles = np.empty((num_tiles, 4), np.int64)
    cost = np.empty(num_tiles, np.int64)
    tile = 0
    for sequence in range(len(context_lens)):
        stop = query_starts[sequence + 1]
        for first in range(query_starts[sequence], stop, _MAX_TILE):
            last = min(first + _MAX_TILE, stop)
            length = context_lens[sequence] - (stop - first) + 1
            tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3] = sequence, first, last, length
            cost[tile] = (last - first) * min(length, window)
            tile += 1
    return tiles, cost


@part
def _attend(call_pointer: Any) -> None:
    """What each thread runs: take one item after another until none is left."""
    call = carray(call_pointer, 1)[0]
    num_floats = call.num_tokens * call.num_heads * call.head_dim
    query = carray(pointer(call.query, np.float32), num_floats)
    out = carray(pointer(call.out, np.float32), num_floats)
    kv_cache = carray(pointer(call.kv_cache, np.float32), call.num_blocks * call.block_floats)
    tables = carray(pointer(call.block_tables, np.int32), (call.num_sequences, call.max_blocks))
    tiles = carray(pointer(call.tiles, np.int64), (call.num_tiles, 4))
    next_item = pointer(call.next_item, np.int64)
    scores = np.empty(MAX_HEADS * CHUNK, np.float32)
    state = np.empty((_MAX_TILE, call.num_heads, 2), np.float32)
    items_per_tile = (call.num_kv_heads + call.heads_per_item - 1) // call.heads_per_item
    while True:
        item = take(next_item)
        if item >= call.num_tiles * items_per_tile:
            return
        tile = tiles[item // items_per_tile]
        first_head = (item % items_per_tile) * call.heads_per_item
        last_head = min(first_head + call.heads_per_item, call.num_kv_heads)
        table = tables[tile[0]]
        _attend_tile(call, query, kv_cache, table, tile, first_head, last_head, scores, state, out)


@part
def _attend_tile(
    call: Any,
    query: Floats,
    kv_cache: Floats,
    block_table: Ints,
    tile: NDArray[np.int64],
    first_head: int,
    last_head: int,
    scores: Floats,
    state: Floats,
    out: Floats,
) -> None:
    """A tile's rows under the KV heads from `first_head` to `last_head` - 1.

    `state` holds the greatest score and the sum of weights of each row and query head so far,
    `out` the sums of weighted values.
    """
    group = call.num_heads // call.num_kv_heads
    heads_at = tile[1] * call.num_heads + first_head * group
    num_heads = (last_head - first_head) * group
    num_rows = tile[2] - tile[1]
    _begin(call, heads_at, num_rows, num_heads, state, out)
    if call.sinks != 0:
        _begin_with_sinks(call, first_head * group, num_rows, num_heads, state)
    head_floats = call.block_size * call.head_dim
    first_base = (call.layer * 2 * call.num_kv_heads + first_head) * head_floats
    end = tile[3] + num_rows - 1
    blocks = block_table[: (end + call.block_size - 1) // call.block_size]
    for start in range(max(tile[3] - call.window, 0) // CHUNK * CHUNK, end, CHUNK):
        first_row = max(start + 1 - tile[3], 0)
        last_row = min(start + CHUNK + call.window - tile[3], num_rows)
        chunk_offset = start % call.block_size
        here = blocks[start // call.block_size :]
        next_chunk = blocks[(start + CHUNK) // call.block_size :]
        for head in range(0, num_heads, group):
            base = first_base + head // group * head_floats
            for row in range(first_row, last_row):
                skipped = max(tile[3] + row - call.window - start, 0)
                num_keys = min(CHUNK, tile[3] + row - start) - skipped
                skipped_blocks, offset = _locate(chunk_offset + skipped, call.block_size)
                row_blocks = here[skipped_blocks:]
                for h in range(head, head + group, MAX_HEADS):
                    heads = min(MAX_HEADS, head + group - h)
                    at = (heads_at + row * call.num_heads + h) * call.head_dim
                    # To prefetch: the same keys' values, then the next head's or chunk's keys.
                    prefetch = row == first_row and h == head
                    next_blocks, next_base = blocks[:0], base
                    if prefetch and head + group < num_heads:
                        next_blocks, next_base = row_blocks, base + head_floats
                    elif prefetch:
                        next_blocks, next_base = next_chunk[skipped_blocks:], first_base
                    _score_chunk(
                        call, heads, query, at, kv_cache, base, row_blocks, offset, num_keys, prefetch, scores
                    )
                    _weigh_chunk(call, heads, num_keys, scores, state[row, h:], out, at)
                    _add_chunk(
                        call,
                        heads,
                        scores,
                        kv_cache,
                        base,
                        row_blocks,
                        offset,
                        num_keys,
                        next_base,
                        next_blocks,
                        out,
                        at,
                    )
    _finish(call, heads_at, num_rows, num_heads, state, out)


@part
def _begin(call: Any, heads_at: int, num_rows: int, num_heads: int, state: Floats, out: Floats) -> None:
    for row in range(num_rows):
        for head in range(num_heads):
            state[row, head, 0] = -np.inf
            state[row, head, 1] = 0
        at = (heads_at + row * call.num_heads) * call.head_dim
        out[at : at + num_heads * call.head_dim] = 0


@part
def _begin_with_sinks(call: Any, first_head: int, num_rows: int, num_heads: int, state: Floats) -> None:
    """A sink is the first score of its head's rows: the greatest so far, of weight 1."""
    sinks = carray(pointer(call.sinks, np.float32), call.num_heads)
    for row in range(num_rows):
        for head in range(num_heads):
            state[row, head, 0] = sinks[first_head + head] * np.float32(_LOG2_E)
            state[row, head, 1] = 1


@part
def _locate(offset: int, block_size: int) -> tuple[int, int]:
    """Block and offset in it of the slot `offset` slots behind the beginning of a block."""
    if offset < block_size:  # so always without a window; a division would take its time
        return 0, offset
    return offset // block_size, offset % block_size


@part
def _finish(call: Any, heads_at: int, num_rows: int, num_heads: int, state: Floats, out: Floats) -> None:
    for row in range(num_rows):
        for head in range(num_heads):
            at = (heads_at + row * call.num_heads + head) * call.head_dim
            total = state[row, head, 1]
            for d in range(at, at + call.head_dim):
                out[d] /= total


@part
def _score_chunk(
    call: Any,
    heads: int,
    query: Floats,
    at: int,
    kv_cache: Floats,
    base: int,
    blocks: Ints,
    offset: int,
    num_keys: int,
    prefetch: bool,
    scores: Floats,
) -> None:
    """Scores of `num_keys` keys, from `offset` in the first block on, for the query heads at `at`."""
    to_value = call.num_kv_heads * call.block_size * call.head_dim
    done = 0
    for block in range(len(blocks)):
        if done == num_keys:
            break
        run = min(call.block_size - offset, num_keys - done)
        keys = base + blocks[block] * call.block_floats + offset * call.head_dim
        ahead = keys + to_value if prefetch else NOTHING
        score_keys(heads, query, at, kv_cache, keys, run, call.head_dim, call.scale, scores, done, ahead)
        done += run
        offset = 0


@part
def _weigh_chunk(
    call: Any, heads: int, num_keys: int, scores: Floats, state: Floats, out: Floats, at: int
) -> None:
    """Make weights of the scores, capped if so wished, and bring earlier sums down to the new greatest."""
    for h in range(heads):
        if call.softcap != 0:
            cap_scores(scores, h * CHUNK, num_keys, call.softcap)
        maximum, total, factor = exponentiate(scores, h * CHUNK, num_keys, state[h, 0])
        state[h, 0] = maximum
        state[h, 1] = state[h, 1] * factor + total
        if factor != 1:
            for d in range(at + h * call.head_dim, at + (h + 1) * call.head_dim):
                out[d] *= factor


@part
def _add_chunk(
    call: Any,
    heads: int,
    weights: Floats,
    kv_cache: Floats,
    base: int,
    blocks: Ints,
    offset: int,
    num_keys: int,
    next_base: int,
    next_blocks: Ints,
    out: Floats,
    at: int,
) -> None:
    """Add the weighted values of the same keys to `out`, while the keys of `next_blocks` come in."""
    to_value = call.num_kv_heads * call.block_size * call.head_dim
    done = 0
    for block in range(len(blocks)):
        if done == num_keys:
            break
        run = min(call.block_size - offset, num_keys - done)
        place = offset * call.head_dim
        ahead = NOTHING
        if block < len(next_blocks):
            ahead = next_base + next_blocks[block] * call.block_floats + place
        values = base + blocks[block] * call.block_floats + place + to_value
        add_values(heads, weights, done, kv_cache, values, run, call.head_dim, out, at, ahead)
        done += run
        offset = 0
