"""Sliding windows, soft caps and sinks: right numbers, and a window's rows feel nothing outside it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.factories import Batch, Model, Tokens, make_batch, make_tokens
from tidemill_kernels.attention_tiles import CHUNK
from tidemill_kernels.paged_attention import paged_attention, paged_attention_reference

BLOCK_SIZE = 16
# Shorter than a block, around one block and two, around a chunk, around the tile of rows that share
# a pass, and longer than every context.
WINDOWS = [1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 128, 200, 201, 1000]
# (start, stop) of each sequence's rows: at and around the edges of blocks, chunks, tiles and windows.
SPANS = [(0, 1), (15, 16), (63, 64), (64, 65), (129, 130), (0, 37), (50, 67), (190, 201)]
OPTIONS = [
    {"window": 20},
    {"softcap": 1.5},
    {"has_sinks": True},
    {"window": 20, "softcap": 1.5},
    {"window": 70, "has_sinks": True},
    {"softcap": 1.5, "has_sinks": True},
    {"window": 33, "softcap": 0.7, "has_sinks": True},
]
SHAPES = [
    # heads, KV heads, head_dim, block size
    (9, 3, 64, 16),
    (4, 4, 16, 8),
    (5, 1, 24, 16),
    (8, 2, 32, 16),
    (10, 2, 48, 16),
    (7, 1, 72, 16),
    (6, 6, 80, 32),
    (4, 2, 96, 16),
    (8, 2, 128, 16),
    (4, 4, 192, 8),
    (8, 1, 256, 16),
    (71, 1, 64, 16),
    (4, 2, 13, 5),
    (3, 3, 16, 100),
    (2, 2, 8, 1),
]


def attend(batch: Batch) -> torch.Tensor:
    return paged_attention(*batch.tensors, **batch.options)


def make_parts(model: Model, *, sharp: float = 1.0) -> list[tuple[Tokens, int, int]]:
    return [
        (make_tokens(stop, model, seed=seed, sharp=sharp), start, stop)
        for seed, (start, stop) in enumerate(SPANS)
    ]


def dense(tokens: Tokens, model: Model) -> torch.Tensor:
    """Every position of a sequence in double precision, by whole matrices and a mask."""
    length, group = len(tokens), model.num_heads // model.num_kv_heads
    query = tokens.query.double().transpose(0, 1)
    key = tokens.key.double().repeat_interleave(group, 1).transpose(0, 1)
    value = tokens.value.double().repeat_interleave(group, 1).transpose(0, 1)
    scores = query @ key.transpose(1, 2) * model.scale
    if model.softcap is not None:
        scores = torch.tanh(scores / model.softcap) * model.softcap
    behind = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (behind < 0) | (behind >= (model.window or length))
    weights = scores.masked_fill(hidden, -math.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if model.sinks is not None:
        total = total + model.sinks.double().exp()[:, None, None]
    return (weights / total @ value).transpose(0, 1)


def assert_right(model: Model, *, block_size: int = BLOCK_SIZE, sharp: float = 1.0) -> None:
    """The kernel, on slots of NaN outside the windows, against the dense computation."""
    parts = make_parts(model, sharp=sharp)
    got = attend(make_batch(parts, model, block_size=block_size))
    expected = torch.cat([dense(tokens, model)[start:stop] for tokens, start, stop in parts])
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6 * max(sharp, 1))


@pytest.mark.parametrize("window", WINDOWS)
def test_a_row_sees_as_many_keys_as_its_window_holds(window: int) -> None:
    assert_right(Model(4, 2, 32, window=window))


@pytest.mark.parametrize("softcap", [1e-3, 0.1, 1.0, 5.0, 50.0, 1e6])
@pytest.mark.parametrize("sharp", [1.0, 20.0])
def test_scores_are_capped(softcap: float, sharp: float) -> None:
    assert_right(Model(4, 2, 32, softcap=softcap), sharp=sharp)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_go_together(options: dict[str, Any]) -> None:
    assert_right(replace(Model(), **options))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), SHAPES)
def test_options_at_every_shape(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, options: dict[str, Any]
) -> None:
    assert_right(replace(Model(num_heads, num_kv_heads, head_dim), **options), block_size=block_size)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_reference_is_what_dense_matrices_give(options: dict[str, Any]) -> None:
    model = replace(Model(6, 2, 16), **options)
    tokens = make_tokens(90, model)
    batch = make_batch([(tokens, 0, 90)], model)
    reference = paged_attention_reference(*batch.tensors, **batch.options)
    torch.testing.assert_close(reference, dense(tokens, model), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 20, 64])
def test_a_broken_key_shows_in_the_rows_whose_window_holds_it_and_in_no_other(
    window: int, bad: float
) -> None:
    # Given a sequence in which one key and value is broken
    model = Model(4, 2, 32, window=window, softcap=2.0, has_sinks=True)
    tokens = make_tokens(200, model)
    clean = attend(make_batch([(tokens, 0, 200)], model))
    tokens.key[70, 1, 3] = bad
    tokens.value[70, 1, 3] = math.nan
    # When the whole of it is computed at once
    broken = attend(make_batch([(tokens, 0, 200)], model))
    # Then the rows before it and those that have left it behind are as they were, and the others not
    assert torch.equal(broken[:70], clean[:70])
    assert torch.equal(broken[70 + window :], clean[70 + window :])
    assert torch.equal(broken[:, :2], clean[:, :2])
    assert not broken[70 : 70 + window, 2:, 3].isfinite().any()


def test_blocks_before_all_windows_are_not_looked_up() -> None:
    # Given a table whose first entries lead nowhere
    model = Model(window=40)
    batch = make_batch([(make_tokens(201, model), 190, 201)], model)
    expected = attend(batch)
    first_seen = (190 - 40 + 1) // BLOCK_SIZE
    batch.block_tables[0, :first_seen] = -(2**31)
    # Then nobody goes there
    assert torch.equal(attend(batch), expected)


def test_a_window_far_into_a_context() -> None:
    # Given rows whose position is so many chunks later than others'
    model = Model(3, 1, 16, window=100, softcap=2.0, has_sinks=True)
    near = make_batch([(make_tokens(205, model), 190, 205)], model)
    far_blocks = 2**17 * CHUNK // BLOCK_SIZE
    table = torch.zeros(1, far_blocks + near.block_tables.shape[1], dtype=torch.int32)
    table[:, far_blocks:] = near.block_tables
    far = near.with_(block_tables=table, context_lens=near.context_lens + far_blocks * BLOCK_SIZE)
    # Then they see the same keys, in the same order
    assert torch.equal(attend(far), attend(near))


@pytest.mark.parametrize("window", [201, 2**31 - 1, 2**31, 2**63])
def test_a_window_that_no_context_fills_changes_nothing(window: int) -> None:
    parts = make_parts(Model())
    assert torch.equal(attend(make_batch(parts, Model(window=window))), attend(make_batch(parts, Model())))


def test_a_cap_that_no_score_comes_near_changes_little() -> None:
    parts = make_parts(Model())
    capped, free = (attend(make_batch(parts, Model(softcap=softcap))) for softcap in (1e4, None))
    torch.testing.assert_close(capped, free, rtol=0, atol=1e-6)


def test_a_cap_near_zero_makes_all_keys_alike() -> None:
    model = Model(4, 4, 16, softcap=1e-9)
    tokens = make_tokens(100, model)
    last = attend(make_batch([(tokens, 99, 100)], model))
    torch.testing.assert_close(last[0], tokens.value.mean(0), rtol=0, atol=1e-6)


def test_the_cap_lies_on_the_scaled_scores_in_natural_units() -> None:
    # Given two keys, of which the second's score is far above the cap of 2, and the first's is 0
    model = Model(1, 1, 16, softcap=2.0)
    tokens = make_tokens(2, model)
    tokens.query[1], tokens.key[0], tokens.key[1] = 1.0, 0.0, 100.0
    tokens.value[0], tokens.value[1] = 0.0, 1.0
    row = attend(make_batch([(tokens, 1, 2)], model))
    # Then its weight is e**2 : 1
    torch.testing.assert_close(row, torch.full_like(row, math.exp(2) / (math.exp(2) + 1)))


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    # Given one key of score 0 and sinks whose weights are 1, 3 and 0 times its own
    model = Model(3, 1, 16)
    tokens = make_tokens(1, model)
    tokens.query[0] = 0.0
    sinks = torch.tensor([0.0, math.log(3), -math.inf])
    row = attend(make_batch([(tokens, 0, 1)], model).with_(sinks=sinks))
    torch.testing.assert_close(row[0], tokens.value[0] * torch.tensor([[1 / 2], [1 / 4], [1]]))


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_far_below_all_scores_change_no_bit(window: int | None) -> None:
    model = Model(window=window)
    batch = make_batch(make_parts(model), model)
    for sink in (-math.inf, -1e30):
        assert torch.equal(attend(batch.with_(sinks=torch.full((9,), sink))), attend(batch))


def test_a_sink_far_above_all_scores_leaves_nothing() -> None:
    batch = make_batch(make_parts(Model()), Model()).with_(sinks=torch.full((9,), 1e4))
    assert torch.equal(attend(batch), torch.zeros_like(batch.query))


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"window": 0}, ValueError, "window of 0"),
        ({"window": -5}, ValueError, "window of -5"),
        ({"softcap": 0.0}, ValueError, r"softcap of 0\.0"),
        ({"softcap": -1.0}, ValueError, "softcap of -1"),
        ({"softcap": math.nan}, ValueError, "softcap of nan"),
        ({"softcap": math.inf}, ValueError, "softcap of inf"),
        ({"sinks": torch.zeros(9).double()}, TypeError, "sinks are float32"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks"),
        ({"sinks": torch.zeros(9, 1)}, ValueError, "sinks"),
        ({"sinks": torch.zeros(18)[::2]}, ValueError, "sinks"),
    ],
)
def test_what_makes_no_sense_is_refused(
    change: dict[str, torch.Tensor | float], error: type[Exception], reason: str
) -> None:
    batch = make_batch([(make_tokens(20, Model()), 18, 20)], Model()).with_(**change)
    with pytest.raises(error, match=reason):
        attend(batch)
