"""SiLU, x / (1 + exp(-x)), with the same bits for an element wherever in a tensor it stands.

torch's own takes whole vectors through one exponential and what is left over at the end of each
thread's share through another: where the number of elements is no multiple of some vectors, the
bits of a row then depend on how many rows stand before it (seen at widths of 48, 80 and 100).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.np.numpy_support import carray, from_dtype
from torch import Tensor

from tidemill_kernels import jit, simd
from tidemill_kernels.jit import Generator, Native, compile_native, digest, emitted, part, pointer, take
from tidemill_kernels.openmp import run_on_threads

SHARE = 4096
"""Elements a thread takes at a time."""

_CALL = np.dtype([(name, np.int64) for name in ("x", "out", "next_item", "count")])


def silu(x: Tensor) -> Tensor:
    """SiLU of every element; float32 on CPU as described above, torch's own elsewhere.

    Accurate to a few units in the last place near 0, to one more for each unit of |x|.
    """
    if x.device.type != "cpu":
        return torch.nn.functional.silu(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    next_item = np.zeros(1, np.int64)
    call = np.array((x.data_ptr(), out.data_ptr(), next_item.ctypes.data, x.numel()), dtype=_CALL)
    run_on_threads(compile_silu().address, call.ctypes.data)
    return out


@functools.cache
def compile_silu() -> Native:
    """What each thread runs: compiled in under a second, then kept on disk."""
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
        silu_range(x, out, start, min(start + SHARE, call.count))


@emitted
def silu_range(typing_context: Any, x: Any, out: Any, start: Any, stop: Any) -> tuple[Any, Generator]:
    """out[i] = silu(x[i]) for start <= i < stop."""
    signature = types.void(x, out, types.int64, types.int64)

    def generate(
        context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]
    ) -> ir.Value | None:
        x, out, start, stop = args
        rest = builder.add(start, simd.whole(builder, builder.sub(stop, start), simd.LANES))
        with simd.steps(builder, start, stop, simd.LANES) as index:
            simd.store(builder, _silu(builder, simd.load(builder, x, index)), out, index)
        with simd.steps(builder, rest, stop, 1) as index:
            simd.store(builder, _silu(builder, simd.load(builder, x, index, simd.FLOAT)), out, index)
        return context.get_dummy_value()

    return signature, generate


def _silu(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """By exp(-|x|), which cannot overflow: x / (1 + e) for x >= 0, x e / (1 + e) below."""
    one, zero = simd.constant(1.0, x), simd.constant(0.0, x)
    positive = builder.fcmp_ordered(">=", x, zero)
    magnitude = builder.select(positive, x, builder.fneg(x))
    e = simd.exp2(builder, builder.fmul(magnitude, simd.constant(-math.log2(math.e), x)))
    numerator = builder.fmul(x, builder.select(positive, one, e))
    return builder.fdiv(numerator, builder.fadd(one, e))
