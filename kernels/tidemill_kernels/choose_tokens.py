"""The next token of each row of logits: edits, truncation, and a draw or the maximum.

The order is vLLM's: what the grammar allows, tokens banned, biases, repetition, frequency and
presence penalty; the maximum for a greedy row; for others temperature, min_p, top_k, top_p, noise.
What a row gets depends on its own logits and its own `ROW` alone; the logits are not written to.
A greedy row without edits is one pass over its logits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import types
from numba.np.numpy_support import carray, from_dtype
from numpy.typing import NDArray

from tidemill_kernels import exact_logits, jit, simd, truncation
from tidemill_kernels import gumbel_argmax as noise
from tidemill_kernels.exact_logits import argmax
from tidemill_kernels.gumbel_argmax import CHUNK, gumbel_argmax
from tidemill_kernels.jit import Native, compile_native, digest, part, pointer, take
from tidemill_kernels.openmp import run_on_threads
from tidemill_kernels.truncation import DIGITS, keep_min_p, keep_top_k, keep_top_p

NO_TOKEN = -1
"""Stands for "there is nothing to choose from"; never a token of any vocabulary."""

ROW = np.dtype(
    [
        ("logits", np.int64),  # address of float32 [vocabulary]
        ("allowed", np.int64),  # address of uint32 [allowed_words], a bit for each token; 0: all are
        ("allowed_words", np.int64),  # tokens beyond them are not allowed
        ("banned", np.int64),  # address of int32 [num_banned]
        ("num_banned", np.int64),
        ("biased", np.int64),  # address of int32 [num_biased]
        ("biases", np.int64),  # address of float32 [num_biased]
        ("num_biased", np.int64),
        ("seen", np.int64),  # address of int32 [num_seen], each token once
        ("counts", np.int64),  # address of int32 [num_seen]: how often in the output
        ("num_seen", np.int64),
        ("seed", np.int64),
        ("choice", np.int64),
        ("index", np.int64),  # of the token in its generation
        ("top_k", np.int64),  # 0 or less keeps all
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("temperature", np.float32),  # 0 is greedy
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
    ]
)
"""What a row asks for. Tokens that are not in the vocabulary are ignored."""

_CALL = np.dtype(
    [
        (name, np.int64)
        for name in ("rows", "tokens", "next_row", "next_thread", "scratch", "num_rows", "vocabulary")
    ]
)
_WORDS = CHUNK * 4
_FIXED_BYTES = 8 * DIGITS + 2 * _WORDS


def scratch_bytes(vocabulary: int) -> int:
    """Bytes that `choose_tokens` needs for each thread: three arrays as wide as the vocabulary."""
    return _FIXED_BYTES + 16 * (vocabulary + vocabulary % 2)


def choose_tokens(rows: NDArray[np.void], vocabulary: int, scratch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose one token for each row.

    Args:
        rows: `ROW` records `[n]`; what their addresses name stays alive meanwhile.
        vocabulary: logits in a row, at most 2^20.
        scratch: at least `scratch_bytes(vocabulary)` for each of torch's threads; what it holds
            does not matter.

    Returns:
        A token for each row; `NO_TOKEN` where the logits hold a NaN or +inf or nothing above -inf, or
        where nothing is left after the edits.
    """
    tokens = np.full(len(rows), NO_TOKEN, np.int64)
    counters = np.zeros(2, np.int64)
    if scratch.nbytes < scratch_bytes(vocabulary) * torch.get_num_threads():
        raise ValueError(f"scratch: {scratch.nbytes} bytes are too few for {vocabulary} tokens")
    call = np.array(
        (
            rows.ctypes.data,
            tokens.ctypes.data,
            counters.ctypes.data,
            counters.ctypes.data + 8,
            scratch.ctypes.data,
            len(rows),
            vocabulary,
        ),
        dtype=_CALL,
    )
    run_on_threads(compile_choose_tokens().address, call.ctypes.data)
    return tokens


@functools.cache
def compile_choose_tokens() -> Native:
    """What each thread runs: compiled in a few seconds, then kept on disk."""
    sources = digest(simd, jit, exact_logits, noise, truncation)

    def share_out(call_pointer: Any) -> None:
        _ = sources
        _share_out(call_pointer)

    return compile_native(types.void(types.CPointer(from_dtype(_CALL))), share_out)


@part
def _share_out(call_pointer: Any) -> None:
    call = carray(call_pointer, 1)[0]
    rows = carray(pointer(call.rows, ROW), call.num_rows)
    tokens = pointer(call.tokens, np.int64)
    next_row = pointer(call.next_row, np.int64)
    thread = take(pointer(call.next_thread, np.int64))
    scratch = call.scratch + thread * (_FIXED_BYTES + 16 * (call.vocabulary + call.vocabulary % 2))
    while True:
        row = take(next_row)
        if row >= call.num_rows:
            return
        tokens[row] = _choose(rows[row], call.vocabulary, scratch)


@part
def _choose(row: Any, count: int, scratch: int) -> int:
    logits = pointer(row.logits, np.float32)
    best = argmax(logits, count)
    edited = row.allowed != 0 or row.num_banned + row.num_biased + row.num_seen > 0
    if best < 0 or (row.temperature == 0 and not edited):
        return best
    x = pointer(scratch + _FIXED_BYTES, np.float32)
    for i in range(count):
        x[i] = logits[i]
    if edited:
        _edit(row, x, count)
    if row.allowed != 0 and argmax(x, count) < 0:  # only what is banned: the grammar goes before the bans
        for i in range(count):
            x[i] = logits[i]
        _allow(x, count, pointer(row.allowed, np.uint32), row.allowed_words)
    return argmax(x, count) if row.temperature == 0 else _draw(row, x, count, scratch)


@part
def _edit(row: Any, x: Any, count: int) -> None:
    if row.allowed != 0:
        _allow(x, count, pointer(row.allowed, np.uint32), row.allowed_words)
    banned = pointer(row.banned, np.int32)
    for i in range(row.num_banned):
        if banned[i] < count:
            x[banned[i]] = np.float32(-np.inf)
    biased, biases = pointer(row.biased, np.int32), pointer(row.biases, np.float32)
    for i in range(row.num_biased):
        if biased[i] < count:
            x[biased[i]] += biases[i]
    _penalize(row, x, count)


@part
def _allow(x: Any, count: int, allowed: Any, words: int) -> None:
    full = np.uint32(0xFFFFFFFF)
    for word in range(min(words, (count + 31) // 32)):
        bits = allowed[word]
        if bits == full:
            continue
        first = 32 * word
        for i in range(min(32, count - first)):
            x[first + i] = x[first + i] if (bits >> i) & 1 else np.float32(-np.inf)
    for i in range(32 * words, count):
        x[i] = np.float32(-np.inf)


@part
def _penalize(row: Any, x: Any, count: int) -> None:
    seen, counts = pointer(row.seen, np.int32), pointer(row.counts, np.int32)
    repetition, frequency, presence = row.repetition_penalty, row.frequency_penalty, row.presence_penalty
    for i in range(row.num_seen):
        token = seen[i]
        if token >= count:
            continue
        logit = x[token]
        logit = logit / repetition if logit > 0 else logit * repetition
        if counts[i] > 0:
            logit -= frequency * np.float32(counts[i])
            logit -= presence
        x[token] = logit


@part
def _draw(row: Any, x: Any, count: int, scratch: int) -> int:
    temperature = row.temperature
    if temperature != 1:
        for i in range(count):
            x[i] = x[i] / temperature
    _truncate(row, x, count, scratch)
    words = pointer(scratch + 8 * DIGITS, np.uint32)
    reaches = pointer(scratch + 8 * DIGITS + _WORDS, np.float32)
    return gumbel_argmax(x, count, np.uint64(row.seed), row.choice, row.index, words, reaches)


@part
def _truncate(row: Any, x: Any, count: int, scratch: int) -> None:
    best = argmax(x, count)
    if best < 0:
        return
    peak = x[best]
    digits = pointer(scratch, np.int64)
    masses = pointer(scratch + _FIXED_BYTES + 4 * (count + count % 2), np.int64)
    held = pointer(scratch + _FIXED_BYTES + 12 * (count + count % 2), np.float32)
    if row.min_p > 0:
        keep_min_p(x, count, peak, row.min_p)
    if 0 < row.top_k < count:
        keep_top_k(x, count, peak, row.top_k, held, masses, digits)
    if row.top_p < 1:
        keep_top_p(x, count, peak, row.top_p, held, masses, digits)
