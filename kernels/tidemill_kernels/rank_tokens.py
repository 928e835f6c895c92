"""Log-probabilities of tokens, their ranks, and the likeliest tokens of each row of logits.

The sum over the vocabulary is one of integers (see `exact_logits`): a log-probability depends on
its row's logits alone, to the bit. The logits are read only.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import carray, from_dtype
from numpy.typing import NDArray

from tidemill_kernels import exact_logits, jit, simd
from tidemill_kernels.exact_logits import WEIGHT_ONE, argmax, order, order_bounds, total_weight
from tidemill_kernels.jit import Floats, Native, compile_native, digest, part, pointer, take
from tidemill_kernels.openmp import run_on_threads

LOWEST = float(np.finfo(np.float32).min)
"""The log-probability of an impossible token: JSON knows no infinity."""

_STRETCH = 64  # tokens of which only the greatest is looked at first

_CALL = np.dtype(
    [
        (name, np.int64)
        for name in (
            "rows",
            "tokens",
            "logprobs",
            "ranks",
            "top_tokens",
            "top_logprobs",
            "top_places",
            "next_row",
            "num_rows",
            "vocabulary",
            "num_top",
        )
    ]
)


@dataclass(frozen=True)
class Ranks:
    """What `rank_tokens` found, `n` rows.

    Attributes:
        logprobs: float32 `[n]`, of the tokens asked for.
        ranks: int64 `[n]`, 1 + how many tokens are likelier.
        top_tokens: int64 `[n, k]`, the likeliest first, of equals the lower id.
        top_logprobs: float32 `[n, k]`, theirs.
    """

    logprobs: Floats
    ranks: NDArray[np.int64]
    top_tokens: NDArray[np.int64]
    top_logprobs: Floats


def rank_tokens(
    rows: NDArray[np.int64], tokens: NDArray[np.int64], *, vocabulary: int, num_top: int
) -> Ranks:
    """Place one token of each row among all others of it.

    Args:
        rows: addresses `[n]` of float32 `[vocabulary]`: logits as the model gave them.
        tokens: `[n]`, below `vocabulary`.
        vocabulary: logits in a row.
        num_top: how many of the likeliest tokens to name, at most `vocabulary`.

    Returns:
        Log-probabilities are `LOWEST` at least; all of a row are, where its logits hold a NaN or +inf or
        nothing above -inf.
    """
    count = len(rows)
    ranks = Ranks(
        np.empty(count, np.float32),
        np.empty(count, np.int64),
        np.empty((count, num_top), np.int64),
        np.empty((count, num_top), np.float32),
    )
    places = np.empty((count, num_top), np.int32)
    next_row = np.zeros(1, np.int64)
    found = (ranks.logprobs, ranks.ranks, ranks.top_tokens, ranks.top_logprobs)
    addresses = (array.ctypes.data for array in (rows, tokens, *found, places, next_row))
    call = np.array((*addresses, count, vocabulary, num_top), dtype=_CALL)
    run_on_threads(compile_rank_tokens().address, call.ctypes.data)
    return ranks


@functools.cache
def compile_rank_tokens() -> Native:
    """What each thread runs: compiled in a few seconds, then kept on disk."""
    sources = digest(simd, jit, exact_logits)

    def share_out(call_pointer: Any) -> None:
        _ = sources
        _share_out(call_pointer)

    return compile_native(types.void(types.CPointer(from_dtype(_CALL))), share_out)


@part
def _share_out(call_pointer: Any) -> None:
    call = carray(call_pointer, 1)[0]
    next_row = pointer(call.next_row, np.int64)
    while True:
        row = take(next_row)
        if row >= call.num_rows:
            return
        _rank(call, row)


@part
def _rank(call: Any, row: int) -> None:
    count, num_top = call.vocabulary, call.num_top
    x = pointer(pointer(call.rows, np.int64)[row], np.float32)
    token = pointer(call.tokens, np.int64)[row]
    best = argmax(x, count)
    # The logarithm of what the exponentials are to be divided by; NaN if that cannot be known.
    divisor = np.nan
    if best >= 0:
        divisor = float(x[best]) + math.log(total_weight(x, count, x[best]) / WEIGHT_ONE)
    pointer(call.logprobs, np.float32)[row] = _logprob(x[token], divisor)
    pointer(call.ranks, np.int64)[row] = 1 + _count_above(x, count, order(x[token]))

    top_tokens = pointer(call.top_tokens + 8 * row * num_top, np.int64)
    top_logprobs = pointer(call.top_logprobs + 4 * row * num_top, np.float32)
    places = pointer(call.top_places + 4 * row * num_top, np.int32)
    _find_top(x, count, num_top, top_tokens, places)
    for i in range(num_top):
        top_logprobs[i] = _logprob(x[top_tokens[i]], divisor)


@part
def _logprob(logit: Any, divisor: float) -> float:
    logprob = float(logit) - divisor
    return logprob if logprob >= LOWEST else LOWEST


@part
def _count_above(x: Any, count: int, place: int) -> int:
    above = 0
    for i in range(count):
        above += order(x[i]) > place
    return above


@part
def _find_top(x: Any, count: int, num_top: int, tokens: Any, places: Any) -> None:
    """Write the `num_top` greatest logits' tokens, in the order of `Ranks.top_tokens`, and their places."""
    held = 0
    for start in range(0, count if num_top > 0 else 0, _STRETCH):
        stop = min(start + _STRETCH, count)
        _, greatest = order_bounds(x, start, stop)
        if held == num_top and greatest <= places[num_top - 1]:
            continue
        for token in range(start, stop):
            place = order(x[token])
            if held == num_top and place <= places[num_top - 1]:
                continue
            held = min(held + 1, num_top)
            slot = held - 1
            while slot > 0 and places[slot - 1] < place:
                tokens[slot], places[slot] = tokens[slot - 1], places[slot - 1]
                slot -= 1
            tokens[slot], places[slot] = token, place
