"""The instructions that attention is made of, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from tidemill_kernels.attention_tiles import CHUNK, NOTHING, add_values, cap_scores, exponentiate, score_keys
from tidemill_kernels.jit import Floats, part


@part
def run_score(heads: int, query: Floats, keys: Floats, num_keys: int, head_dim: int, out: Floats) -> None:
    score_keys(heads, query, 0, keys, 0, num_keys, head_dim, np.float32(2), out, 0, NOTHING)


@part
def run_add(heads: int, weights: Floats, values: Floats, num_keys: int, head_dim: int, out: Floats) -> None:
    add_values(heads, weights, 0, values, 0, num_keys, head_dim, out, 0, NOTHING)


@part
def run_exponentiate(scores: Floats, num_keys: int, maximum: float) -> tuple[float, float, float]:
    result: tuple[float, float, float] = exponentiate(scores, 0, num_keys, maximum)
    return result


@part
def run_cap(scores: Floats, at: int, num_keys: int, cap: float) -> None:
    cap_scores(scores, at, num_keys, cap)


def whole_numbers(*shape: int) -> Floats:
    """Small whole numbers: every order of adding them is exact."""
    return np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)


@pytest.mark.parametrize("head_dim", [1, 7, 8, 9, 16, 64, 80])
@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_each_score_lands_in_its_place(heads: int, head_dim: int) -> None:
    for num_keys in range(1, 18):
        query, keys = whole_numbers(heads, head_dim), whole_numbers(num_keys, head_dim)
        out = np.full((heads, CHUNK), np.nan, np.float32)
        run_score(heads, query.ravel(), keys.ravel(), num_keys, head_dim, out.ravel())
        assert np.array_equal(out[:, :num_keys], 2 * query @ keys.T)
        assert np.isnan(out[:, num_keys:]).all()


@pytest.mark.parametrize("head_dim", [1, 7, 8, 9, 16, 64, 80])
@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_weighted_values_are_added(heads: int, head_dim: int) -> None:
    for num_keys in (1, 2, 5, 16):
        weights, values = whole_numbers(heads, CHUNK), whole_numbers(num_keys, head_dim)
        out = whole_numbers(heads + 1, head_dim)
        expected = out.copy()
        expected[:heads] += weights[:, :num_keys] @ values
        run_add(heads, weights.ravel(), values.ravel(), num_keys, head_dim, out.ravel())
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("num_keys", [1, 7, 8, 9, 63, 64])
def test_weights_are_powers_of_two_below_the_maximum(num_keys: int) -> None:
    scores = np.random.default_rng(1).uniform(-140, 10, CHUNK).astype(np.float32)
    before = scores.copy()
    maximum, total, factor = run_exponentiate(scores, num_keys, np.float32(-3))
    assert maximum == max(before[:num_keys].max(), -3)
    distance = before[:num_keys] - np.float32(maximum)
    exact = np.where(distance < -126, 0, np.exp2(distance.astype(np.float64)))
    np.testing.assert_allclose(scores[:num_keys], exact, rtol=1.5e-7, atol=0)
    np.testing.assert_allclose(total, exact.sum(), rtol=1e-6)
    np.testing.assert_allclose(factor, 2.0 ** float(np.float32(-3) - np.float32(maximum)), rtol=1.5e-7)


def test_the_greatest_weight_is_exactly_one_and_the_first_factor_zero() -> None:
    scores = np.full(CHUNK, 0.1, np.float32)
    maximum, total, factor = run_exponentiate(scores, 3, np.float32(-np.inf))
    assert (maximum, total, factor) == (np.float32(0.1), 3.0, 0.0)
    assert scores[:3].tolist() == [1.0, 1.0, 1.0]


def test_a_score_that_is_no_number_makes_the_sum_none() -> None:
    for bits in (0x7FC00000, 0x7FC00001, 0xFFFFFFFF):
        scores = np.zeros(CHUNK, np.float32)
        scores[5:6] = np.array([bits], np.uint32).view(np.float32)
        assert np.isnan(run_exponentiate(scores, 8, np.float32(0))[1])


def test_scores_are_capped_by_a_tangent_to_its_last_places() -> None:
    chance = np.random.default_rng(2)
    scores = np.concatenate(
        [
            chance.uniform(-10, 10, 40 * CHUNK),
            chance.uniform(-0.5, 0.5, 40 * CHUNK),
            np.exp(chance.uniform(-80, 5, 40 * CHUNK)) * chance.choice([-1, 1], 40 * CHUNK),
        ]
    ).astype(np.float32)
    exact = np.tanh(scores.astype(np.float64))
    for at in range(0, len(scores), CHUNK):
        run_cap(scores, at, CHUNK, np.float32(1))
    assert (np.abs(scores - exact) <= 4 * np.spacing(np.abs(exact).astype(np.float32))).all()


def test_a_cap_keeps_what_is_special() -> None:
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, -1e30], np.float32)
    scores = np.zeros(CHUNK, np.float32)
    scores[: len(special)] = special
    run_cap(scores, 0, len(special), np.float32(3))
    np.testing.assert_array_equal(scores[: len(special)], np.array([0, -0.0, 3, -3, np.nan, -3], np.float32))
    assert np.signbit(scores[:2]).tolist() == [False, True]


@pytest.mark.parametrize("num_keys", [1, 7, 8, 9, 63, 64])
def test_a_capped_score_has_the_same_bits_wherever_it_stands(num_keys: int) -> None:
    scores = np.random.default_rng(3).uniform(-3, 3, CHUNK).astype(np.float32)
    together = scores.copy()
    run_cap(together, 0, num_keys, np.float32(2))
    for key in range(num_keys):
        alone = np.full(CHUNK, np.nan, np.float32)
        alone[0] = scores[key]
        run_cap(alone, 0, 1, np.float32(2))
        assert alone[0] == together[key]
    # Nothing beyond a whole vector is touched.
    padded = -(-num_keys // 8) * 8
    assert np.array_equal(together[padded:], scores[padded:])
