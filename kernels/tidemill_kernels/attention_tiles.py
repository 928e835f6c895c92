"""The products and exponentials of attention on the CPU, on one run of keys of one KV head.

Each is an instruction for numba code, emitted with the vector arithmetic of `simd`. Arrays are flat
float32; a place in one is given as an index. Query heads of a group are handled together, so that
keys and values are loaded once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from tidemill_kernels import simd
from tidemill_kernels.jit import Generator, emitted
from tidemill_kernels.simd import LANES

CHUNK = 64
"""Keys per step of the softmax, and the width of a row of scores. It is part of the result's bits:
chunks begin at its multiples. Twice as many are no faster, half as many 5 % slower."""
MAX_HEADS = 4
"""Query heads whose products run together."""
NOTHING = -1
"""In place of an index: nothing to prefetch."""

# Keys of a score tile and vectors of an output tile, by number of heads: the accumulators and their
# operands fit the 16 registers of AVX2, and 8 or more sums run at once to hide the latency of an fma.
_KEYS_AT_ONCE = {1: 8, 2: 4, 3: 4, 4: 2}
_VECTORS_AT_ONCE = {1: 8, 2: 4, 3: 4, 4: 2}
_LINE = 16  # floats of a cache line
_NEAREST = 3  # prefetch into the first-level cache: 22 ms for 32 rows at 300 tokens, second level 28


@emitted
def score_keys(
    typing_context: Any,
    heads: Any,
    query: Any,
    query_at: Any,
    cache: Any,
    keys_at: Any,
    num_keys: Any,
    head_dim: Any,
    scale: Any,
    scores: Any,
    scores_at: Any,
    ahead: Any,
) -> tuple[Any, Generator]:
    """scores[head, key] = scale * query[head] . key, while as many floats at `ahead` are prefetched."""
    i64 = types.int64
    signature = types.void(i64, query, i64, cache, i64, i64, i64, types.float32, scores, i64, i64)

    def generate(
        context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]
    ) -> ir.Value | None:
        heads, _, _, _, _, num_keys, head_dim, scale, _, _, ahead = args
        q, k, out = (_places(context, builder, signature, args, i) for i in (1, 3, 8))
        tile = _ScoreTile(builder, q, k, out, head_dim, scale)
        prefetch = _prefetcher(context, builder, signature.args[3], args[3], ahead)
        # Key tiles take whole vectors only; what is left over goes one head and key at a time.
        ragged = builder.icmp_signed("!=", builder.urem(head_dim, simd.size(LANES)), simd.size(0))
        in_tiles = builder.select(ragged, simd.size(0), num_keys)
        done = simd.slot(builder, simd.SIZE)
        builder.store(simd.size(0), done)

        def emit(heads: int) -> None:
            at_once = _KEYS_AT_ONCE[heads]
            with simd.steps(builder, simd.size(0), in_tiles, at_once) as key:
                prefetch(builder.mul(key, head_dim), builder.mul(simd.size(at_once), head_dim))
                tile.emit(simd.size(0), heads, key, at_once)
            builder.store(simd.whole(builder, in_tiles, at_once), done)

        _by_heads(builder, heads, emit)
        with (
            simd.steps(builder, builder.load(done), num_keys, 1) as key,
            simd.steps(builder, simd.size(0), heads, 1) as head,
        ):
            tile.emit(head, 1, key, 1, ragged)
        return context.get_dummy_value()

    return signature, generate


@emitted
def add_values(
    typing_context: Any,
    heads: Any,
    weights: Any,
    weights_at: Any,
    cache: Any,
    values_at: Any,
    num_keys: Any,
    head_dim: Any,
    out: Any,
    out_at: Any,
    ahead: Any,
) -> tuple[Any, Generator]:
    """out[head] += sum of weights[head, key] * value, while as many floats at `ahead` are prefetched."""
    i64 = types.int64
    signature = types.void(i64, weights, i64, cache, i64, i64, i64, out, i64, i64)

    def generate(
        context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]
    ) -> ir.Value | None:
        heads, _, _, _, _, num_keys, head_dim, _, _, ahead = args
        w, v, out = (_places(context, builder, signature, args, i) for i in (1, 3, 7))
        tile = _ValueTile(builder, w, v, out, num_keys, head_dim)
        prefetch = _prefetcher(context, builder, signature.args[3], args[3], ahead)

        def emit(heads: int) -> None:
            start = simd.size(0)
            for vectors in (_VECTORS_AT_ONCE[heads], 1):
                with simd.steps(builder, start, head_dim, vectors * LANES) as d:
                    tile.emit(simd.size(0), heads, d, simd.VECTOR, vectors, prefetch)
                start = simd.whole(builder, head_dim, vectors * LANES)

        _by_heads(builder, heads, emit)
        with (
            simd.steps(builder, simd.whole(builder, head_dim, LANES), head_dim, 1) as d,
            simd.steps(builder, simd.size(0), heads, 1) as head,
        ):
            tile.emit(head, 1, d, simd.FLOAT, 1, prefetch)
        return context.get_dummy_value()

    return signature, generate


@emitted
def cap_scores(
    typing_context: Any, scores: Any, scores_at: Any, num_keys: Any, cap: Any
) -> tuple[Any, Generator]:
    """Replace scores by cap * tanh(score). Those past `num_keys` are overwritten, up to a whole vector."""
    signature = types.void(scores, types.int64, types.int64, types.float32)

    def generate(
        context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]
    ) -> ir.Value | None:
        _, _, num_keys, cap = args
        row = _places(context, builder, signature, args, 0)
        padded = simd.whole(builder, builder.add(num_keys, simd.size(LANES - 1)), LANES)
        with simd.steps(builder, simd.size(0), padded, LANES) as key:
            capped = simd.tanh(builder, simd.load(builder, row, key))
            simd.store(builder, builder.fmul(capped, simd.splat(builder, cap)), row, key)
        return context.get_dummy_value()

    return signature, generate


@emitted
def exponentiate(
    typing_context: Any, scores: Any, scores_at: Any, num_keys: Any, maximum: Any
) -> tuple[Any, Generator]:
    """Replace scores by 2**(score - m), m the greater of their maximum and `maximum`.

    Returns m, the sum of the new scores, and 2**(maximum - m). Scores past `num_keys`, up to a
    whole vector, are overwritten.
    """
    f32 = types.float32
    signature = types.UniTuple(f32, 3)(scores, types.int64, types.int64, f32)

    def generate(
        context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]
    ) -> ir.Value | None:
        _, _, num_keys, before = args
        row = _places(context, builder, signature, args, 0)
        padded = simd.whole(builder, builder.add(num_keys, simd.size(LANES - 1)), LANES)
        with simd.steps(builder, num_keys, padded, 1) as key:
            simd.store(builder, ir.Constant(simd.FLOAT, float("-inf")), row, key)
        highest = simd.slot(builder, simd.VECTOR)
        builder.store(simd.splat(builder, before), highest)
        with simd.steps(builder, simd.size(0), padded, LANES) as key:
            builder.store(simd.maximum(builder, simd.load(builder, row, key), builder.load(highest)), highest)
        maximum = simd.max_lane(builder, builder.load(highest))
        total = simd.zeros(builder, 1)[0]
        with simd.steps(builder, simd.size(0), padded, LANES) as key:
            distance = builder.fsub(simd.load(builder, row, key), simd.splat(builder, maximum))
            weight = simd.exp2(builder, distance)
            simd.store(builder, weight, row, key)
            builder.store(builder.fadd(builder.load(total), weight), total)
        results = (
            maximum,
            simd.sum_lanes(builder, [builder.load(total)]),
            simd.exp2(builder, builder.fsub(before, maximum)),
        )
        return context.make_tuple(builder, signature.return_type, results)

    return signature, generate


class _ScoreTile:
    """Emits the scores of some heads and keys; each is one sum, whatever tile it is part of."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        query: ir.Value,
        keys: ir.Value,
        out: ir.Value,
        head_dim: ir.Value,
        scale: ir.Value,
    ) -> None:
        self.builder, self.query, self.keys, self.out = builder, query, keys, out
        self.head_dim, self.scale = head_dim, scale

    def emit(
        self,
        head: ir.Value,
        num_heads: int,
        key: ir.Value,
        num_keys: int,
        ragged: ir.Value | None = None,
    ) -> None:
        """`ragged`, if given, says at run time whether the last vector of a row is a part of one."""
        builder = self.builder
        sums = [simd.zeros(builder, num_keys) for _ in range(num_heads)]
        queries = _rows(builder, head, num_heads, self.head_dim)
        keys = _rows(builder, key, num_keys, self.head_dim)

        def accumulate(load: Callable[[ir.Value, ir.Value], ir.Value], d: ir.Value) -> None:
            q = [load(self.query, builder.add(row, d)) for row in queries]
            k = [load(self.keys, builder.add(row, d)) for row in keys]
            for h in range(num_heads):
                for j in range(num_keys):
                    total = simd.fma(builder, q[h], k[j], builder.load(sums[h][j]))
                    builder.store(total, sums[h][j])

        with simd.steps(builder, simd.size(0), self.head_dim, LANES) as d:
            accumulate(lambda base, index: simd.load(builder, base, index), d)
        if ragged is not None:
            with builder.if_then(ragged):
                rest = builder.urem(self.head_dim, simd.size(LANES))
                accumulate(
                    lambda base, index: simd.load_part(builder, base, index, rest),
                    builder.sub(self.head_dim, rest),
                )
        scale = self.scale if num_keys == 1 else simd.splat(builder, self.scale, num_keys)
        for slots, row in zip(sums, _rows(builder, head, num_heads, simd.size(CHUNK)), strict=True):
            total = simd.sum_lanes(builder, [builder.load(slot) for slot in slots])
            simd.store(builder, builder.fmul(total, scale), self.out, builder.add(row, key))


class _ValueTile:
    """Emits the weighted sum of the values for some heads and a part of the head dimension.

    Keys are added one after another, so the tile's shape leaves no trace in the sums.
    """

    def __init__(
        self,
        builder: ir.IRBuilder,
        weights: ir.Value,
        values: ir.Value,
        out: ir.Value,
        num_keys: ir.Value,
        head_dim: ir.Value,
    ) -> None:
        self.builder, self.weights, self.values, self.out = builder, weights, values, out
        self.num_keys, self.head_dim = num_keys, head_dim

    def emit(
        self,
        head: ir.Value,
        num_heads: int,
        d: ir.Value,
        type_: ir.Type,
        count: int,
        prefetch: Callable[[ir.Value, ir.Value], None],
    ) -> None:
        """`count` vectors or floats, as `type_` says, from `d` on."""
        builder = self.builder
        offsets = [builder.add(d, simd.size(i * LANES)) for i in range(count)]
        outs = [
            [builder.add(row, offset) for offset in offsets]
            for row in _rows(builder, head, num_heads, self.head_dim)
        ]
        sums = [[simd.slot(builder, type_) for _ in range(count)] for _ in range(num_heads)]
        for slot, index in _pairs(sums, outs):
            builder.store(simd.load(builder, self.out, index, type_), slot)
        with simd.steps(builder, simd.size(0), self.num_keys, 1) as key:
            row = builder.mul(key, self.head_dim)
            if type_ is simd.VECTOR:
                for i in range(0, count * LANES, _LINE):
                    prefetch(builder.add(builder.add(row, d), simd.size(i)), simd.size(_LINE))
            weights = [
                simd.load(builder, self.weights, builder.add(at, key), simd.FLOAT)
                for at in _rows(builder, head, num_heads, simd.size(CHUNK))
            ]
            if type_ is simd.VECTOR:
                weights = [simd.splat(builder, weight) for weight in weights]
            for i, offset in enumerate(offsets):
                value = simd.load(builder, self.values, builder.add(row, offset), type_)
                for h, weight in enumerate(weights):
                    total = simd.fma(builder, weight, value, builder.load(sums[h][i]))
                    builder.store(total, sums[h][i])
        for slot, index in _pairs(sums, outs):
            simd.store(builder, builder.load(slot), self.out, index)


def _places(
    context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value], position: int
) -> ir.Value:
    """Address of the element that argument `position`, an array, and the next, an index, tell."""
    array = context.make_array(signature.args[position])(context, builder, args[position])
    return simd.at(builder, array.data, args[position + 1])


def _rows(builder: ir.IRBuilder, first: ir.Value, count: int, width: ir.Value) -> list[ir.Value]:
    return [builder.mul(builder.add(first, simd.size(i)), width) for i in range(count)]


def _pairs(slots: list[list[ir.Value]], places: list[list[ir.Value]]) -> list[tuple[ir.Value, ir.Value]]:
    return [
        pair for row, indices in zip(slots, places, strict=True) for pair in zip(row, indices, strict=True)
    ]


def _by_heads(builder: ir.IRBuilder, heads: ir.Value, emit: Callable[[int], None]) -> None:
    """Emit code for 1 to `MAX_HEADS` heads, chosen among at run time."""
    for count in range(1, MAX_HEADS + 1):
        with builder.if_then(builder.icmp_signed("==", heads, simd.size(count))):
            emit(count)


def _prefetcher(
    context: Any, builder: ir.IRBuilder, type_: Any, array: ir.Value, ahead: ir.Value
) -> Callable[[ir.Value, ir.Value], None]:
    """Emits the prefetch of `count` floats from `ahead` + `offset` of the array on."""
    base = simd.at(builder, context.make_array(type_)(context, builder, array).data, ahead)
    wanted = builder.icmp_signed("!=", ahead, simd.size(NOTHING))

    def prefetch(offset: ir.Value, count: ir.Value) -> None:
        with (
            builder.if_then(wanted),
            simd.steps(builder, offset, builder.add(offset, count), _LINE) as index,
        ):
            simd.prefetch(builder, base, index, _NEAREST)

    return prefetch
