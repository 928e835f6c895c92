"""A row of logits without rounding: their order and their weights as integers.

Sums of integers are exact, so neither the order of a sum nor the way in which a compiler cuts a
loop into vectors can leave a trace in the result. That is why these loops may be left to it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from tidemill_kernels import simd
from tidemill_kernels.jit import Generator, emitted, part

WEIGHT_ONE = 1 << 40
"""The weight of the most likely token. Others are rounded to 1 / 2^40 of it: over a vocabulary of
2^18 tokens, all errors at their worst together are 2^-23 of the sum, the last bit of a float32.
2^22 tokens and more can be summed."""

INFINITE = 0x7F800000
"""`order` of infinity; beyond it and below its negative there are only NaNs."""

_MANTISSA_STEP = 4096.0  # doubles from 2^12 to 2^13 are 2^-40 apart
_LONG = ir.IntType(64)


@emitted
def weight(typing_context: Any, gap: Any) -> tuple[Any, Generator]:
    """exp(gap) * WEIGHT_ONE, rounded to an integer, for a float32 gap <= 0; 0 for -inf."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        power = builder.fmul(args[0], simd.constant(math.log2(math.e), args[0]))
        double = builder.fpext(simd.exp2(builder, power), ir.DoubleType())
        step = ir.Constant(ir.DoubleType(), _MANTISSA_STEP)
        bits = builder.bitcast(builder.fadd(double, step), _LONG)
        return builder.sub(bits, builder.bitcast(step, _LONG))

    return types.int64(types.float32), generate


@emitted
def order(typing_context: Any, x: Any) -> tuple[Any, Generator]:
    """An int32 that is as great as the float32 `x` is among floats, 0.0 and -0.0 being equal."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        bits = builder.bitcast(args[0], simd.INT)
        magnitude = builder.and_(bits, ir.Constant(simd.INT, 0x7FFFFFFF))
        negative = builder.icmp_signed("<", bits, ir.Constant(simd.INT, 0))
        return builder.select(negative, builder.neg(magnitude), magnitude)

    return types.int32(types.float32), generate


@emitted
def value(typing_context: Any, place: Any) -> tuple[Any, Generator]:
    """The float32 whose `order` is `place`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        negative = builder.icmp_signed("<", args[0], ir.Constant(simd.INT, 0))
        sign = ir.Constant(simd.INT, 0x80000000)
        bits = builder.select(negative, builder.or_(builder.neg(args[0]), sign), args[0])
        return builder.bitcast(bits, simd.FLOAT)

    return types.float32(types.int32), generate


@part
def order_bounds(x: Any, start: int, stop: int) -> tuple[int, int]:
    """The least and the greatest `order` of x[start:stop], which is not empty."""
    least = greatest = order(x[start])
    for i in range(start, stop):
        place = order(x[i])
        least = min(least, place)
        greatest = max(greatest, place)
    return least, greatest


@part
def first_of(x: Any, start: int, stop: int, place: int) -> int:
    """The first index from `start` on of a float with this `order`; `stop` if there is none."""
    for i in range(start, stop):
        if order(x[i]) == place:
            return i
    return stop


@part
def argmax(x: Any, count: int) -> int:
    """The index of the greatest of `count` floats, the first one of equals.

    -1 if there is no answer: a NaN or +inf among them, or nothing above -inf.
    """
    best = -INFINITE
    best_start = 0
    for start in range(0, count, 1024):
        stop = min(start + 1024, count)
        least, greatest = order_bounds(x, start, stop)
        if least < -INFINITE or greatest >= INFINITE:
            return -1
        if greatest > best:
            best, best_start = greatest, start
    if best == -INFINITE:
        return -1
    return first_of(x, best_start, count, best)


@part
def total_weight(x: Any, count: int, peak: float) -> int:
    """The sum of all weights, `peak` being the greatest of the floats."""
    total = 0
    for i in range(count):
        total += weight(np.float32(x[i] - peak))
    return total
