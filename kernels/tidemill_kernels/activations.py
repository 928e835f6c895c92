"""Activation functions with the same bits for an element wherever in a tensor it stands.

torch's own take whole vectors through one approximation and what is left over at the end of each
thread's share, or of each row of a strided tensor, through another: where the number of elements is
no multiple of some vectors, the bits of a row then depend on how many rows stand before it (seen at
widths of 48, 80 and 100, for each function below; tanh, exp, erf and ReLU were steady).

All are built of e**-|x|, which cannot overflow. Their reference is torch's own, which also serves
tensors that are not float32 on CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.numpy_support import carray, from_dtype
from torch import Tensor
from torch.nn import functional

from tidemill_kernels import jit, simd
from tidemill_kernels.jit import Generator, Native, compile_native, digest, emitted, part, pointer, take
from tidemill_kernels.openmp import run_on_threads

SHARE = 4096
"""Elements a thread takes at a time."""

_CALL = np.dtype([(name, np.int64) for name in ("function", "x", "out", "next_item", "count")])


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e**-x), to 4 units in the last place."""
    return _activate("sigmoid", x)


def silu(x: Tensor) -> Tensor:
    """X sigmoid(x), to 4 units in the last place."""
    return _activate("silu", x)


def quick_gelu(x: Tensor) -> Tensor:
    """X sigmoid(1.702 x), to 4 units in the last place."""
    return _activate("quick_gelu", x)


def gelu(x: Tensor) -> Tensor:
    """X times the normal distribution's share below x, to 7 units in the last place."""
    return _activate("gelu", x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The approximation of `gelu` by 0.5 x (1 + tanh(z)), z = sqrt(2 / pi) (x + 0.044715 x**3).

    To 3 units in the last place near 0, and below 0 to 5 more for each unit of |z|.
    """
    return _activate("gelu_tanh", x)


def mish(x: Tensor) -> Tensor:
    """X tanh(log(1 + e**x)), to 6 units in the last place."""
    return _activate("mish", x)


def _activate(name: str, x: Tensor) -> Tensor:
    if x.device.type != "cpu" or x.dtype is not torch.float32:
        return _FUNCTIONS[name].reference(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    next_item = np.zeros(1, np.int64)
    addresses = (x.data_ptr(), out.data_ptr(), next_item.ctypes.data)
    call = np.array((_NUMBERS[name], *addresses, x.numel()), dtype=_CALL)
    run_on_threads(compile_activations().address, call.ctypes.data)
    return out


@functools.cache
def compile_activations() -> Native:
    """What each thread runs, for all the functions: compiled in about a second, then kept on disk."""
    sources = digest(simd, jit)

    def share_out(call_pointer: Any) -> None:
        _ = sources
        _share_out(call_pointer)

    signature = types.void(types.CPointer(from_dtype(_CALL)))
    return compile_native(signature, share_out)


@part
def _share_out(call_pointer: Any) -> None:
    call = carray(call_pointer, 1)[0]
    x = pointer(call.x, np.float32)
    out = pointer(call.out, np.float32)
    next_item = pointer(call.next_item, np.int64)
    while True:
        start = take(next_item) * SHARE
        if start >= call.count:
            return
        activate_range(call.function, x, out, start, min(start + SHARE, call.count))


@emitted
def activate_range(
    typing_context: Any, function: Any, x: Any, out: Any, start: Any, stop: Any
) -> tuple[Any, Generator]:
    """out[i] = f(x[i]) for start <= i < stop, f by its place among the functions."""
    signature = types.void(types.int64, x, out, types.int64, types.int64)

    def generate(
        context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]
    ) -> ir.Value | None:
        function, x, out, start, stop = args
        rest = builder.add(start, simd.whole(builder, builder.sub(stop, start), simd.LANES))
        for number, each in enumerate(_FUNCTIONS.values()):
            with cgutils.if_likely(builder, builder.icmp_signed("==", function, simd.size(number))):
                with simd.steps(builder, start, stop, simd.LANES) as index:
                    simd.store(builder, each.emit(builder, simd.load(builder, x, index)), out, index)
                with simd.steps(builder, rest, stop, 1) as index:
                    value = each.emit(builder, simd.load(builder, x, index, simd.FLOAT))
                    simd.store(builder, value, out, index)
        return context.get_dummy_value()

    return signature, generate


# The exponential beyond these arguments is nothing beside 1.
_VANISHED = 128.0
# The share of the normal distribution beyond x >= 0 is e**(-x**2 / 2) times a polynomial of
# t = 1 / (1 + 0.24 x) without constant term; lowest power first: least maximal relative error up to
# x = 13.3, 3.0e-9 before rounding.
_TAIL_SLOPE = 0.24
_TAIL = (
    0.0957430803274685,
    0.0958396120229646,
    0.08906733162837821,
    0.08719638081948568,
    0.029657028233606657,
    0.13886492984466325,
    -0.14137734259559487,
    0.20344830958510057,
    -0.12382354311615186,
    0.025384214762927366,
)


def _sigmoid(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return _logistic(builder, simd.constant(1.0, x), x)


def _silu(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return _logistic(builder, x, x)


def _gelu_tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """(1 + tanh(z)) / 2 is sigmoid(2 z)."""
    slope = 2 * math.sqrt(2 / math.pi)
    square = builder.fmul(x, x)
    slopes = simd.fma(builder, square, simd.constant(0.044715 * slope, x), simd.constant(slope, x))
    return _logistic(builder, x, builder.fmul(x, slopes))


def _quick_gelu(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    slope = 1.702
    nearest = float(np.float32(slope))
    magnitude = _at_most(builder, _magnitude(builder, x), _VANISHED)
    product = builder.fmul(magnitude, simd.constant(nearest, x))
    rest = simd.fma(builder, magnitude, simd.constant(nearest, x), builder.fneg(product))
    rest = simd.fma(builder, magnitude, simd.constant(slope - nearest, x), rest)
    return _share(builder, x, x, _exp_minus(builder, product, rest))


def _gelu(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    one, half = simd.constant(1.0, x), simd.constant(0.5, x)
    magnitude = _at_most(builder, _magnitude(builder, x), math.sqrt(2 * _VANISHED))
    halved = builder.fmul(magnitude, half)
    square = builder.fmul(magnitude, halved)
    rest = simd.fma(builder, magnitude, halved, builder.fneg(square))
    t = builder.fdiv(one, simd.fma(builder, magnitude, simd.constant(_TAIL_SLOPE, x), one))
    tail = simd.constant(_TAIL[-1], x)
    for coefficient in reversed(_TAIL[:-1]):
        tail = simd.fma(builder, tail, t, simd.constant(coefficient, x))
    tail = builder.fmul(builder.fmul(tail, t), _exp_minus(builder, square, rest))
    beyond = builder.fmul(magnitude, tail)
    return builder.select(_is_positive(builder, x), builder.fsub(x, beyond), builder.fneg(beyond))


def _mish(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """With e = e**-|x|: tanh(log(1 + 1 / e)) = (1 + 2 e) / (1 + 2 e + 2 e e), and so on below 0."""
    one, two = simd.constant(1.0, x), simd.constant(2.0, x)
    e = _exp_minus(builder, _at_most(builder, _magnitude(builder, x), _VANISHED))
    positive = _is_positive(builder, x)
    numerator = builder.select(
        positive, simd.fma(builder, e, two, one), builder.fmul(e, builder.fadd(e, two))
    )
    more = builder.select(positive, builder.fmul(builder.fmul(e, e), two), two)
    return builder.fdiv(builder.fmul(x, numerator), builder.fadd(numerator, more))


def _logistic(builder: ir.IRBuilder, factor: ir.Value, x: ir.Value) -> ir.Value:
    """The factor times sigmoid(x)."""
    e = _exp_minus(builder, _at_most(builder, _magnitude(builder, x), _VANISHED))
    return _share(builder, factor, x, e)


def _share(builder: ir.IRBuilder, factor: ir.Value, x: ir.Value, e: ir.Value) -> ir.Value:
    """By e = e**-|x|: factor / (1 + e) for x >= 0, factor e / (1 + e) below."""
    one = simd.constant(1.0, x)
    numerator = builder.fmul(factor, builder.select(_is_positive(builder, x), one, e))
    return builder.fdiv(numerator, builder.fadd(one, e))


def _exp_minus(builder: ir.IRBuilder, x: ir.Value, rest: ir.Value | None = None) -> ir.Value:
    """e**-(x + rest) to 2 units in the last place, x >= 0 and finite, rest small beside 1.

    What rounding takes from the exponent of 2 is given back as a factor.
    """
    log_2 = float(np.float32(math.log(2)))
    exponent = builder.fmul(x, simd.constant(-math.log2(math.e), x))
    lost = simd.fma(builder, exponent, simd.constant(-log_2, x), builder.fneg(x))
    lost = simd.fma(builder, exponent, simd.constant(log_2 - math.log(2), x), lost)
    if rest is not None:
        lost = builder.fsub(lost, rest)
    e = simd.exp2(builder, exponent)
    return simd.fma(builder, e, lost, e)


def _magnitude(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    bits = _bits(builder, x)
    return builder.bitcast(builder.and_(bits, simd.constant(0x7FFFFFFF, bits)), x.type)


def _is_positive(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """By the sign bit, which is the mask of a blend as it stands."""
    bits = _bits(builder, x)
    return builder.icmp_signed(">=", bits, simd.constant(0, bits))


def _bits(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    vector = isinstance(x.type, ir.VectorType)
    return builder.bitcast(x, ir.VectorType(simd.INT, simd.LANES) if vector else simd.INT)


def _at_most(builder: ir.IRBuilder, x: ir.Value, limit: float) -> ir.Value:
    """The smaller of both; NaN for NaN."""
    most = simd.constant(limit, x)
    return builder.select(builder.fcmp_ordered(">", x, most), most, x)


@dataclass(frozen=True)
class _Function:
    """One function: how it is computed, of a float or a vector, and torch's own."""

    emit: Callable[[ir.IRBuilder, ir.Value], ir.Value]
    reference: Callable[[Tensor], Tensor]


_FUNCTIONS = {
    "silu": _Function(_silu, functional.silu),
    "sigmoid": _Function(_sigmoid, torch.sigmoid),
    "gelu": _Function(_gelu, functional.gelu),
    "gelu_tanh": _Function(_gelu_tanh, functools.partial(functional.gelu, approximate="tanh")),
    "quick_gelu": _Function(_quick_gelu, lambda x: x * torch.sigmoid(1.702 * x)),
    "mish": _Function(_mish, functional.mish),
}
_NUMBERS = {name: number for number, name in enumerate(_FUNCTIONS)}
