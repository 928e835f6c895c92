"""Sampling by the Gumbel-max trick, with noise that is a pure function of the job.

The token chosen is `argmax(logits[v] + G[v])`, which is a draw from `softmax(logits)`. The noise
`G[v]` comes from the counter-based generator Philox4x32-10 (Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC'11), keyed by the seed and counted by (token, index in the
generation, choice): it depends on nothing that a batch, a preemption or another worker could
change.

Two logarithms for each token of a vocabulary would cost more than all else. So the search asks
first how far the noise of a token can carry it: at most `-log(1 - uniform)`, of which the binary
exponent of a float gives a bound. Only those that could win by that, a handful, are looked at.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from tidemill_kernels import simd
from tidemill_kernels.exact_logits import argmax, order, order_bounds
from tidemill_kernels.jit import Generator, emitted, part

MAX_GUMBEL = 22.9
"""Above -log(-log(u)) for the largest u below, 1 - 2^-33: a logit this far behind cannot win."""

CHUNK = 128
"""Tokens whose noise is looked at together; the search needs room for as many words and floats."""

_SLACK = 1e-3  # more than the roundings of a bound
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORDS = ir.VectorType(simd.INT, simd.LANES)
_LONGS = ir.VectorType(simd.SIZE, simd.LANES)


@part
def philox4x32(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Ten rounds of Philox4x32: four 32-bit words from a 128-bit counter and a 64-bit key.

    Arguments and results are words below 2^32.
    """
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c0
        p1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@part
def gumbel_of(word: np.uint64) -> float:
    """Standard Gumbel noise from one word of the generator."""
    uniform = (float(word) + 0.5) / 4294967296.0
    return -math.log(-math.log(uniform))


@part
def gumbel(token: int, index: int, choice: int, seed: np.uint64) -> float:
    """Standard Gumbel noise of one token, the `index`-th of a generation."""
    counter = np.uint64(token)
    words = philox4x32(
        counter >> np.uint64(2),
        np.uint64(index),
        np.uint64(choice),
        np.uint64(0),
        np.uint64(seed) & np.uint64(0xFFFFFFFF),
        np.uint64(seed) >> np.uint64(32),
    )
    lane = counter & np.uint64(3)
    word = words[0]
    if lane == 1:
        word = words[1]
    elif lane == 2:
        word = words[2]
    elif lane == 3:
        word = words[3]
    return gumbel_of(word)


@part
def gumbel_argmax(
    logits: Any, count: int, seed: np.uint64, choice: int, index: int, words: Any, reaches: Any
) -> int:
    """Draw a token with probability `softmax(logits)`; -1 if `argmax` has no answer.

    Args:
        logits: pointer to `count` floats, already divided by the temperature; -inf excludes a token.
        count: size of the vocabulary.
        seed: below 2^63.
        choice: which of several generations of one job.
        index: position of the drawn token in its generation.
        words: room for `CHUNK` uint32.
        reaches: room for `CHUNK` float32.
    """
    best_token = argmax(logits, count)
    if best_token < 0:
        return -1
    peak = logits[best_token]
    best = float(peak) + gumbel(best_token, index, choice, seed)
    for first in range(0, count, CHUNK):
        stop = min(first + CHUNK, count)
        _, greatest = order_bounds(logits, first, stop)
        if greatest < order(np.float32(best - MAX_GUMBEL)) - 2:
            continue
        fill_words(first // 4, index, choice, seed, words)
        if not _any_reaches(logits, first, stop, peak, best - peak, words, reaches):
            continue
        for token in range(first, stop):
            if reaches[token - first] >= best - peak:
                perturbed = float(logits[token]) + gumbel_of(np.uint64(words[token - first]))
                if perturbed > best or (perturbed == best and token < best_token):
                    best, best_token = perturbed, token
    return best_token


@emitted
def fill_words(
    typing_context: Any, first_block: Any, index: Any, choice: Any, seed: Any, words: Any
) -> tuple[Any, Generator]:
    """Write the words of `CHUNK` tokens from `4 * first_block` on: Philox for several blocks at once."""
    signature = types.void(types.int64, types.int64, types.int64, types.uint64, words)

    def generate(
        context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]
    ) -> ir.Value | None:
        first_block, index, choice, seed, words = args
        low = builder.trunc(seed, simd.INT)
        high = builder.trunc(builder.lshr(seed, ir.Constant(simd.SIZE, 32)), simd.INT)
        blocks = builder.trunc(first_block, simd.INT)
        counter = [blocks, builder.trunc(index, simd.INT), builder.trunc(choice, simd.INT)]
        for block in range(0, CHUNK // 4, simd.LANES):
            mixed = _philox(builder, [*counter, ir.Constant(simd.INT, 0)], [low, high], block)
            _store_interleaved(builder, mixed, words, 4 * block)
        return context.get_dummy_value()

    return signature, generate


def _philox(
    builder: ir.IRBuilder, counter: list[ir.Value], key: list[ir.Value], first_lane: int
) -> list[ir.Value]:
    """`philox4x32` of eight counters that differ in their first word: lane i adds `first_lane` + i."""
    lanes = ir.Constant(_WORDS, [first_lane + lane for lane in range(simd.LANES)])
    c0, c1, c2, c3 = (_splat_word(builder, word) for word in counter)
    c0 = builder.add(c0, lanes)
    low, shift = (ir.Constant(_LONGS, [value] * simd.LANES) for value in (0xFFFFFFFF, 32))
    c0, c1, c2, c3 = (builder.zext(c, _LONGS) for c in (c0, c1, c2, c3))
    factors = [ir.Constant(_LONGS, [factor] * simd.LANES) for factor in (0xD2511F53, 0xCD9E8D57)]
    for _ in range(10):
        k0, k1 = (builder.zext(_splat_word(builder, word), _LONGS) for word in key)
        p0, p1 = builder.mul(factors[0], c0), builder.mul(factors[1], c2)
        c0, c1, c2, c3 = (
            builder.xor(builder.xor(builder.lshr(p1, shift), c1), k0),
            builder.and_(p1, low),
            builder.xor(builder.xor(builder.lshr(p0, shift), c3), k1),
            builder.and_(p0, low),
        )
        key = [builder.add(k, ir.Constant(simd.INT, step)) for k, step in zip(key, _KEY_STEPS, strict=True)]
    return [builder.trunc(c, _WORDS) for c in (c0, c1, c2, c3)]


def _splat_word(builder: ir.IRBuilder, word: ir.Value) -> ir.Value:
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(simd.INT, 0))
    return builder.shuffle_vector(first, first, ir.Constant(_WORDS, [0] * simd.LANES))


def _store_interleaved(builder: ir.IRBuilder, columns: list[ir.Value], words: ir.Value, offset: int) -> None:
    """Write four vectors as the columns of eight rows of four words."""
    wide = ir.VectorType(simd.INT, 2 * simd.LANES)
    pairs = [
        builder.shuffle_vector(*columns[i : i + 2], ir.Constant(wide, list(range(2 * simd.LANES))))
        for i in (0, 2)
    ]
    order = [column * simd.LANES + row for row in range(simd.LANES) for column in range(4)]
    rows = builder.shuffle_vector(*pairs, ir.Constant(ir.VectorType(simd.INT, 4 * simd.LANES), order))
    target = builder.gep(words, [simd.size(offset)])
    builder.store(rows, builder.bitcast(target, rows.type.as_pointer()), align=4)


@part
def _any_reaches(
    logits: Any, first: int, stop: int, peak: float, needed: float, words: Any, reaches: Any
) -> bool:
    """Write how far above `peak` each token can come at most; whether one can come up to `needed`."""
    least = np.float32(needed)
    hits = 0
    for i in range(stop - first):
        reach = (logits[first + i] - peak) + gumbel_bound(words[i])
        reaches[i] = reach
        hits += reach >= least
    return hits > 0


@emitted
def gumbel_bound(typing_context: Any, word: Any) -> tuple[Any, Generator]:
    """A float32 above the noise that a uint32 `word` makes, and close to it where the noise is large.

    For u = 1 - v, -log(-log(u)) <= -log(v); and log2(v) is at least the exponent of the float v
    plus the fraction of its mantissa, which is what its bits say when read as an integer.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        half = builder.lshr(builder.not_(args[0]), ir.Constant(simd.INT, 1))  # v * 2^31, rounded down
        bits = builder.bitcast(builder.sitofp(half, simd.FLOAT), simd.INT)
        log2 = builder.fmul(builder.sitofp(bits, simd.FLOAT), ir.Constant(simd.FLOAT, math.log(2) / 2**23))
        return builder.fsub(ir.Constant(simd.FLOAT, (127 + 31) * math.log(2) + _SLACK), log2)

    return types.float32(types.uint32), generate
