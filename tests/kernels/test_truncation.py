"""min_p, top_k and top_p against their definitions, which sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from tidemill_kernels.jit import pointer
from tidemill_kernels.truncation import DIGITS, keep_min_p, keep_top_k, keep_top_p

Logits = NDArray[np.float32]


@njit
def keep(kind, x, count, peak, value, room):  # type: ignore[no-untyped-def]  # compiled: numba infers them
    logits, held = pointer(x, np.float32), pointer(room, np.float32)
    masses, digits = pointer(room + 8 * count, np.int64), pointer(room + 16 * count, np.int64)
    if kind == 0:
        keep_min_p(logits, count, peak, value)
    elif kind == 1:
        keep_top_k(logits, count, peak, int(value), held, masses, digits)
    else:
        keep_top_p(logits, count, peak, value, held, masses, digits)


KINDS = ("min_p", "top_k", "top_p")


def kept(kind: str, logits: Logits, value: float) -> list[int]:
    """The tokens that are left; their logits are untouched, all others are -inf."""
    x = logits.copy()
    room = np.full(2 * len(x) + DIGITS, -1, np.int64)  # what the arrays hold before must not matter
    keep(KINDS.index(kind), x.ctypes.data, len(x), x.max(), float(value), room.ctypes.data)
    left = np.flatnonzero(x > -np.inf)
    assert np.array_equal(x[left], logits[left])
    return [int(token) for token in left]


def by_likelihood(logits: Logits) -> list[int]:
    """Likeliest first, the lower id first of equals, without those that are excluded already."""
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))
    return [int(token) for token in order if logits[token] > -np.inf]


def expected_top_p(logits: Logits, top_p: float) -> list[int]:
    order = by_likelihood(logits)
    weights = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    return sorted(token for token, mass in zip(order, before, strict=True) if mass < top_p * weights.sum())


def rows() -> dict[str, Logits]:
    generator = np.random.default_rng(0)
    wide = (generator.standard_normal(5000) * 3).astype(np.float32)
    excluded = wide.copy()
    excluded[generator.integers(0, 5000, 4000)] = -np.inf
    steps = np.round(generator.standard_normal(2000) * 2).astype(np.float32)
    return {
        "wide": wide,
        "shifted": wide - 50,
        "small": (generator.standard_normal(7) * 2).astype(np.float32),
        "peaked": np.concatenate([wide[:1000] - 30, np.array([0.0, 1.0], np.float32)]),
        "ties": steps,
        "flat": np.zeros(1000, np.float32),
        "nearly flat": (1 + np.arange(1000)[::-1] * np.float32(2**-23)).astype(np.float32),
        "mostly excluded": excluded,
        "one left": np.array([-np.inf] * 70 + [3.0] + [-np.inf] * 70, np.float32),
        "signed zeros": np.array([-0.0, 0.0, -0.0, -1.0, 0.0], np.float32),
        "huge": np.array([3e38, -3e38, 2e38, 0.0, 3e38], np.float32),
    }


ROWS = rows()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("top_k", [1, 2, 5, 40, 79, 80, 999, 1500, 4999])
def test_top_k_keeps_the_k_likeliest(name: str, top_k: int) -> None:
    logits = ROWS[name]
    if top_k < len(logits):
        assert kept("top_k", logits, top_k) == sorted(by_likelihood(logits)[:top_k])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.4999, 0.8, 0.95, 0.999, 1 - 1e-7])
def test_top_p_keeps_the_smallest_set_that_reaches_it(name: str, top_p: float) -> None:
    logits = ROWS[name]
    assert kept("top_p", logits, top_p) == expected_top_p(logits, top_p)


@pytest.mark.parametrize("top_p", [1 - 2**-53, 1 - 1e-12, 1 - 1e-9])
def test_top_p_near_one_drops_only_what_has_no_mass(top_p: float) -> None:
    dropped = set(range(5000)) - set(kept("top_p", ROWS["wide"], top_p))
    weights = np.exp(ROWS["wide"].astype(np.float64) - float(ROWS["wide"].max()))
    assert sum(weights[token] for token in dropped) <= (1 - top_p) * weights.sum() + 1e-11


@pytest.mark.parametrize("name", [name for name in ROWS if name != "huge"])
@pytest.mark.parametrize("min_p", [1e-12, 0.01, 0.3, 0.9999, 1.0])
def test_min_p_keeps_what_comes_near_the_likeliest(name: str, min_p: float) -> None:
    logits = ROWS[name]
    gaps = logits.astype(np.float64) - float(logits.max())
    left = kept("min_p", logits, min_p)
    rounding = 1e-6 * (1 + abs(math.log(min_p)))
    assert set(left) >= set(np.flatnonzero(gaps > math.log(min_p) + rounding).tolist())
    assert set(left) <= set(np.flatnonzero(gaps >= math.log(min_p) - rounding).tolist())
    assert int(logits.argmax()) in left


def test_equal_logits_are_taken_in_the_order_of_their_ids() -> None:
    # Ten tokens of 10 % each: 35 % takes four of them.
    assert kept("top_p", np.zeros(10, np.float32), 0.35) == [0, 1, 2, 3]
    assert kept("top_k", np.zeros(10, np.float32), 3) == [0, 1, 2]
    assert kept("top_k", np.array([1.0, 2.0, 1.0, 1.0], np.float32), 2) == [0, 1]


def test_zeros_of_both_signs_are_equal() -> None:
    assert kept("top_k", ROWS["signed zeros"], 2) == [0, 1]
