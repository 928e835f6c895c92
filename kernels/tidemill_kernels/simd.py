"""Float32 vector arithmetic in an exact, explicit order, for kernels compiled by numba.

A compiler that vectorises a loop by itself may sum it in another order in each copy of the loop,
and the last bits of a result would then depend on which copy served it. What is emitted here is
neither reordered nor contracted, so a value depends on its inputs alone, on every CPU.

The functions emit LLVM instructions at a builder's position; they are called from the code
generators of numba intrinsics, where Python loops unroll.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir
from numba.core import cgutils

LANES = 8
"""Floats in a vector: one register of AVX2."""

FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
FLOAT_BYTES = 4
INT = ir.IntType(32)
SIZE = ir.IntType(64)

# 2**f on [-0.5, 0.5], lowest power first: least maximal relative error, 1.9e-9 before rounding.
_EXP2 = (
    1.0,
    0.6931472057372665,
    0.24022646890630273,
    0.05550328776968139,
    0.009618488957538487,
    0.0013399931218212521,
    0.0001534581188719665,
)
_EXP2_LOWEST = -126.0  # below it the result is no normal number
_ROUND = 1.5 * 2**23  # adding it leaves the nearest integer in the low bits of a float

# Which inputs meet in `sum_lanes`, so that the sums come out in the order of the inputs.
_SUM_ORDER = {1: (0,), 2: (0, 1), 4: (0, 2, 1, 3), 8: (0, 4, 1, 5, 2, 6, 3, 7)}


def size(value: int) -> ir.Constant:
    return ir.Constant(SIZE, value)


def at(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """Address of element `index` of the floats at `base`."""
    return builder.gep(base, [index])


def load(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, type_: ir.Type = VECTOR) -> ir.Value:
    pointer = builder.bitcast(at(builder, base, index), type_.as_pointer())
    return builder.load(pointer, align=FLOAT_BYTES)


def store(builder: ir.IRBuilder, value: ir.Value, base: ir.Value, index: ir.Value) -> None:
    pointer = builder.bitcast(at(builder, base, index), value.type.as_pointer())
    builder.store(value, pointer, align=FLOAT_BYTES)


def prefetch(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, level: int) -> None:
    """Ask the memory for the cache line that holds the float at `index`, and do not wait for it."""
    pointer = builder.bitcast(at(builder, base, index), ir.IntType(8).as_pointer())
    flags = [ir.Constant(INT, flag) for flag in (0, level, 1)]  # to read; nearest cache; data
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *flags])


def load_part(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, count: ir.Value) -> ir.Value:
    """A vector of the `count` floats at `index`, then zeros; no float beyond them is read."""
    part = zeros(builder, 1)[0]
    floats = builder.bitcast(part, FLOAT.as_pointer())
    with steps(builder, size(0), count, 1) as lane:
        store(builder, load(builder, base, builder.add(index, lane), FLOAT), floats, lane)
    return builder.load(part)


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
    """A vector with `scalar` in every lane."""
    empty = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INT, lanes), [0] * lanes))


def constant(value: float, like: ir.Value) -> ir.Constant:
    if isinstance(like.type, ir.VectorType):
        return ir.Constant(like.type, [value] * like.type.count)
    return ir.Constant(like.type, value)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """The sum a * b + c, rounded once."""
    return _call(builder, _named("fma", a), a.type, [a, b, c])


def maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x for x <= 0, of a float or a vector; exactly 1 at 0, 0 below -126, NaN for NaN."""
    fraction, scale = _split(builder, x)
    result = builder.fmul(_polynomial(builder, _EXP2, fraction), scale)
    return builder.select(builder.fcmp_ordered("<", x, constant(_EXP2_LOWEST, x)), constant(0.0, x), result)


def tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The hyperbolic tangent of a float or a vector, to 4 units in the last place; NaN for NaN.

    With e = exp(-2 |x|) - 1, which cannot overflow, it is -e / (e + 2) with the sign of x. e is the
    sum of scale * (2**fraction - 1) and scale - 1: near 0 the second is 0, and the first exact to
    its last places because the polynomial's 1 is left out.
    """
    magnitude = _call(builder, _named("fabs", x), x.type, [x])
    power = builder.fmul(magnitude, constant(-2 * math.log2(math.e), x))
    fraction, scale = _split(builder, power)
    above_one = builder.fmul(_polynomial(builder, _EXP2[1:], fraction), fraction)
    e = fma(builder, above_one, scale, builder.fsub(scale, constant(1.0, x)))
    gone = builder.fcmp_ordered("<", power, constant(_EXP2_LOWEST, x))
    e = builder.select(gone, constant(-1.0, x), e)
    result = builder.fdiv(e, builder.fadd(e, constant(2.0, x)))
    return _call(builder, _named("copysign", x), x.type, [result, x])


def _split(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The fraction f in [-0.5, 0.5] and 2**n with f + n = x, for -126 <= x <= 0."""
    shifted = builder.fadd(x, constant(_ROUND, x))
    fraction = builder.fsub(x, builder.fsub(shifted, constant(_ROUND, x)))
    bits = ir.VectorType(INT, LANES) if isinstance(x.type, ir.VectorType) else INT
    exponent = builder.add(builder.bitcast(shifted, bits), constant(127, builder.bitcast(shifted, bits)))
    exponent = builder.shl(exponent, constant(23, exponent))
    return fraction, builder.bitcast(exponent, x.type)


def _polynomial(builder: ir.IRBuilder, coefficients: Sequence[float], x: ir.Value) -> ir.Value:
    """The sum of coefficients[i] * x**i, by Horner's rule."""
    power = constant(coefficients[-1], x)
    for coefficient in reversed(coefficients[:-1]):
        power = fma(builder, power, x, constant(coefficient, x))
    return power


def sum_lanes(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    """The sum of each of 1, 2, 4 or 8 vectors: a vector of as many sums, or a float if one.

    Each sum is the same tree over its lanes (distance 4, then 2, then 1), however many there are.
    """
    level = [vectors[i] for i in _SUM_ORDER[len(vectors)]]
    for distance in (4, 2, 1):
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [builder.fadd(*_halves(builder, pair, distance)) for pair in pairs]
    return level[0] if len(vectors) > 1 else builder.extract_element(level[0], ir.Constant(INT, 0))


def max_lane(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The greatest lane, as a float."""
    for distance in (4, 2, 1):
        vector = maximum(builder, *_halves(builder, [vector], distance))
    return builder.extract_element(vector, ir.Constant(INT, 0))


def _halves(builder: ir.IRBuilder, pair: list[ir.Value], distance: int) -> list[ir.Value]:
    """The lanes of one vector, or of two, split in two so that lanes `distance` apart face each other."""
    width: int = pair[0].type.count
    first = [lane for lane in range(width) if lane % (2 * distance) < distance]
    if len(pair) == 2:
        # By halves of a register, x then y in each: shuffles that cross the halves are slow.
        half = max(2 * distance, 4)
        first = [
            source * width + lane
            for start in range(0, width, half)
            for source in (0, 1)
            for lane in first
            if start <= lane < start + half
        ]
    mask = ir.VectorType(INT, len(first))
    return [
        builder.shuffle_vector(pair[0], pair[-1], ir.Constant(mask, [lane + offset for lane in first]))
        for offset in (0, distance)
    ]


@contextmanager
def steps(builder: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int) -> Iterator[ir.Value]:
    """Loop over start, start + step, .. while a whole step is left; yields the counter."""
    last = builder.sub(stop, size(step - 1))
    with cgutils.for_range_slice(builder, start, last, size(step), SIZE) as (counter, _):
        yield counter


def whole(builder: ir.IRBuilder, count: ir.Value, step: int) -> ir.Value:
    """The part of `count` that `steps` from 0 covers."""
    return builder.sub(count, builder.urem(count, size(step)))


def slot(builder: ir.IRBuilder, type_: ir.Type) -> ir.Value:
    """Address of a variable, which the optimizer keeps in a register."""
    return cgutils.alloca_once(builder, type_)


def zeros(builder: ir.IRBuilder, count: int) -> list[ir.Value]:
    """Addresses of `count` vector variables, set to zero here."""
    slots = [slot(builder, VECTOR) for _ in range(count)]
    for variable in slots:
        builder.store(ir.Constant(VECTOR, [0.0] * LANES), variable)
    return slots


def _named(function: str, like: ir.Value) -> str:
    """Name of the LLVM intrinsic of floats, or of vectors."""
    return f"llvm.{function}.v{LANES}f32" if isinstance(like.type, ir.VectorType) else f"llvm.{function}.f32"


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
    """Call the LLVM intrinsic of that name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, args)
