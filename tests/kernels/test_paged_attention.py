"""Paged attention on CPU: right numbers at every shape, from no slot but the row's own."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.factories import Batch, Model, guarded, guards_hold, make_batch, make_tokens
from tidemill_kernels.paged_attention import paged_attention, paged_attention_reference

SHAPES = [
    # heads, KV heads, head_dim, block size
    (9, 3, 64, 16),
    (1, 1, 16, 8),
    (8, 8, 32, 16),
    (4, 1, 64, 32),
    (8, 2, 128, 16),
    (8, 1, 80, 8),
    (14, 2, 64, 16),
    (6, 6, 80, 32),
    (5, 1, 24, 16),
    (10, 2, 48, 16),
    (7, 1, 72, 16),
    (4, 2, 96, 16),
    (4, 4, 192, 8),
    (16, 1, 256, 16),
    (71, 1, 64, 16),
    (6, 2, 4, 16),
    (4, 2, 13, 16),
    (2, 1, 100, 5),
    (2, 2, 24, 1),
    (3, 3, 16, 100),
]


def exact(batch: Batch) -> torch.Tensor:
    return paged_attention_reference(*batch.tensors, **batch.options)


def attend(batch: Batch) -> torch.Tensor:
    return paged_attention(*batch.tensors, **batch.options)


def mixed_batch(model: Model, *, block_size: int = 16, sharp: float = 1.0) -> Batch:
    """Decode rows and prefill chunks, at and around the edges of blocks, chunks and tiles."""
    spans = [(0, 1), (15, 16), (16, 17), (63, 64), (64, 65), (129, 130), (0, 37), (50, 67), (190, 201)]
    parts = [
        (make_tokens(stop, model, seed=seed, sharp=sharp), start, stop)
        for seed, (start, stop) in enumerate(spans)
    ]
    return make_batch(parts, model, block_size=block_size)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), SHAPES)
def test_it_is_attention_over_each_rows_own_keys(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    # Given a batch in which every slot that belongs to no row's past is NaN
    batch = mixed_batch(Model(num_heads, num_kv_heads, head_dim), block_size=block_size)
    # Then what comes out is the definition, computed in double precision
    torch.testing.assert_close(attend(batch).double(), exact(batch), rtol=0, atol=2e-6)


@pytest.mark.parametrize("sharp", [0.0, 5.0, 100.0, 1e4])
def test_it_holds_for_flat_and_for_sharp_weights(sharp: float) -> None:
    batch = mixed_batch(Model(4, 2, 32), sharp=sharp)
    expected = exact(batch)
    # Scores are rounded in float32, and weights follow them exponentially.
    torch.testing.assert_close(attend(batch).double(), expected, rtol=0, atol=2e-6 * max(sharp, 1))


def test_long_context() -> None:
    model = Model(3, 1, 64)
    batch = make_batch([(make_tokens(3001, model), 2999, 3001)], model)
    torch.testing.assert_close(attend(batch).double(), exact(batch), rtol=0, atol=2e-6)


def test_the_reference_is_softmax_attention() -> None:
    model = Model(4, 2, 16)
    tokens = make_tokens(20, model)
    expected = torch.nn.functional.scaled_dot_product_attention(
        tokens.query.double().transpose(0, 1),
        tokens.key.double().transpose(0, 1),
        tokens.value.double().transpose(0, 1),
        is_causal=True,
        enable_gqa=True,
    ).transpose(0, 1)
    torch.testing.assert_close(exact(make_batch([(tokens, 0, 20)], model)), expected)


def test_out_is_filled_and_nothing_beside_it() -> None:
    batch = mixed_batch(Model(14, 2, 40))
    out = guarded(batch.query.shape)
    result = paged_attention(*batch.tensors, **batch.options, out=out)
    assert result is out
    assert torch.equal(out, attend(batch))
    assert guards_hold(out)


def test_inputs_are_left_alone() -> None:
    batch = mixed_batch(Model())
    before = [tensor.clone() for tensor in (batch.query, batch.kv_cache, batch.block_tables)]
    attend(batch)
    after = (batch.query, batch.kv_cache, batch.block_tables)
    for was, now in zip(before, after, strict=True):
        assert torch.equal(was.nan_to_num(0.5), now.nan_to_num(0.5))


def test_no_rows_and_sequences_without_rows() -> None:
    model = Model()
    tokens = make_tokens(40, model)
    none = make_batch([(tokens, 40, 40)], model)
    assert attend(none).shape == (0, 9, 64)
    some = make_batch([(tokens, 40, 40), (tokens, 38, 40), (tokens, 40, 40)], model)
    assert torch.equal(attend(some), attend(make_batch([(tokens, 38, 40)], model)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_key_shows_in_the_rows_that_see_it_and_in_no_other(bad: float) -> None:
    model = Model(4, 2, 32)
    tokens = make_tokens(100, model)
    clean = attend(make_batch([(tokens, 0, 100)], model))
    tokens.key[70, 1, 3] = bad
    tokens.value[70, 1, 3] = bad
    broken = attend(make_batch([(tokens, 0, 100)], model))
    assert torch.equal(broken[:70], clean[:70])
    assert torch.equal(broken[:, :2], clean[:, :2])
    assert not broken[70:, 2:, 3].isfinite().any()


def test_a_cache_of_more_than_2_31_floats() -> None:
    # Given a cache whose last block lies past the reach of 32-bit indices (untouched memory is free)
    model = Model(1, 1, 64, num_layers=1)
    num_blocks = 2**31 // (2 * 16 * 64) + 2
    kv_cache = torch.empty(num_blocks, 1, 2, 1, 16, 64)
    small = make_batch([(make_tokens(16, model), 15, 16)], model)
    kv_cache[-1] = small.kv_cache[int(small.block_tables[0, 0])]
    large = small.with_(kv_cache=kv_cache, block_tables=torch.full((1, 1), num_blocks - 1, dtype=torch.int32))
    assert torch.equal(attend(large), attend(small))


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"query": torch.zeros(2, 9, 64, dtype=torch.float16)}, TypeError, "takes float32"),
        ({"kv_cache": torch.zeros(4, 2, 2, 3, 16, 64).double()}, TypeError, "kv_cache torch.float64"),
        ({"context_lens": torch.tensor([20])}, TypeError, "int32"),
        ({"query": torch.zeros(2, 64, 9).transpose(1, 2)}, ValueError, "not contiguous"),
        ({"query": torch.zeros(2, 9, 32)}, ValueError, "do not fit"),
        ({"query": torch.zeros(2, 8, 64)}, ValueError, "do not fit"),
        ({"query_starts": torch.tensor([0, 1, 2], dtype=torch.int32)}, ValueError, "same sequences"),
        ({"layer": 2}, ValueError, "layer 2 of a cache of 2 layers"),
        ({"layer": -1}, ValueError, "layer -1"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, torch.Tensor | int], error: type[Exception], reason: str
) -> None:
    model = Model()
    batch = make_batch([(make_tokens(20, model), 18, 20)], model).with_(**change)
    with pytest.raises(error, match=reason):
        attend(batch)
