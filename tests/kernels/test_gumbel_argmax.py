"""The noise: Philox as published, and a search that skips only what cannot win."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from tidemill_kernels.gumbel_argmax import (
    CHUNK,
    MAX_GUMBEL,
    fill_words,
    gumbel,
    gumbel_argmax,
    gumbel_bound,
    gumbel_of,
    philox4x32,
)
from tidemill_kernels.jit import pointer

WORD = 0xFFFFFFFF


@njit
def search(logits, count, seed, choice, index, words, reaches):  # type: ignore[no-untyped-def]  # compiled: numba infers them
    floats = pointer(logits, np.float32)
    room = pointer(words, np.uint32), pointer(reaches, np.float32)
    return gumbel_argmax(floats, count, np.uint64(seed), choice, index, room[0], room[1])


@njit
def words_of(first_block, index, choice, seed, words):  # type: ignore[no-untyped-def]  # compiled: numba infers them
    fill_words(first_block, index, choice, np.uint64(seed), pointer(words, np.uint32))


@njit
def bound_of(word):  # type: ignore[no-untyped-def]  # compiled: numba infers them
    return gumbel_bound(np.uint32(word))


def draw(logits: NDArray[np.float32], seed: int, choice: int = 0, index: int = 0) -> int:
    words, reaches = np.zeros(CHUNK, np.uint32), np.zeros(CHUNK, np.float32)
    room = words.ctypes.data, reaches.ctypes.data
    return int(search(logits.ctypes.data, len(logits), seed, choice, index, *room))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers of Random123, kat_vectors, philox4x32 with 10 rounds.
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert list(philox4x32(*(np.uint64(word) for word in (*counter, *key)))) == expected


@pytest.mark.parametrize(
    ("first_block", "index", "choice", "seed"),
    [(0, 0, 0, 0), (32, 5, 1, 7), (12288, 131_071, 63, 2**63 - 1), (96, 1, 2, 0xFFFFFFFF << 20)],
)
def test_many_words_at_once_are_the_words_one_by_one(
    first_block: int, index: int, choice: int, seed: int
) -> None:
    words = np.zeros(CHUNK, np.uint32)
    words_of(first_block, index, choice, seed, words.ctypes.data)
    expected = [
        word
        for block in range(first_block, first_block + CHUNK // 4)
        for word in philox4x32(
            *(np.uint64(value) for value in (block, index, choice, 0, seed & WORD, seed >> 32))
        )
    ]
    assert words.tolist() == expected


def test_the_bound_is_never_below_the_noise() -> None:
    generator = np.random.default_rng(0)
    near_one = WORD - (2.0 ** generator.uniform(0, 32, 3000)).astype(np.int64)
    words = [0, 1, WORD - 2, WORD - 1, WORD, *near_one, *generator.integers(0, 2**32, 3000)]
    for word in words:
        noise, bound = gumbel_of(np.uint64(word)), bound_of(word)
        assert noise < bound
        assert noise < 3 or word >= WORD - 1 or bound < noise + 0.7  # or else the search would look at all


@pytest.mark.parametrize("size", [1, 5, CHUNK, CHUNK + 1, 3000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_the_search_finds_what_a_full_search_finds(size: int, spread: float) -> None:
    generator = np.random.default_rng(0)
    for index in range(15):
        logits = (generator.standard_normal(size) * spread).astype(np.float32)
        logits[generator.integers(0, size, size // 3)] = -np.inf
        logits[-1] = 0.0
        noise = [gumbel(token, index, 3, np.uint64(5)) for token in range(size)]
        expected = int(np.argmax(logits.astype(np.float64) + noise))
        assert draw(logits, seed=5, choice=3, index=index) == expected


def test_the_search_is_not_misled_by_large_logits() -> None:
    # Floats of this size are 8 apart, so that the sum of logit and noise could lose the noise.
    generator = np.random.default_rng(3)
    logits = (1e8 + 8 * generator.integers(0, 3, 1000)).astype(np.float32)
    for index in range(15):
        noise = [gumbel(token, index, 0, np.uint64(5)) for token in range(1000)]
        assert draw(logits, seed=5, index=index) == int(np.argmax(logits.astype(np.float64) + noise))


def test_there_is_nothing_to_draw_where_the_logits_are_not_usable() -> None:
    for bad in (np.nan, -np.nan, np.inf):
        assert draw(np.array([0.0, bad, 1.0], np.float32), seed=1) == -1
    assert draw(np.full(300, -np.inf, np.float32), seed=1) == -1


def test_the_noise_stays_below_its_bound_and_has_its_moments() -> None:
    noise = np.array([gumbel(token, 3, 0, np.uint64(11)) for token in range(20_000)])
    assert noise.max() < MAX_GUMBEL
    assert gumbel_of(np.uint64(WORD)) < MAX_GUMBEL
    assert noise.mean() == pytest.approx(0.5772, abs=0.05)
    assert noise.std() == pytest.approx(np.pi / 6**0.5, abs=0.05)


def test_choices_and_neighbouring_tokens_are_independent() -> None:
    first = np.array([gumbel(token, 0, 0, np.uint64(1)) for token in range(4000)])
    other_choice = np.array([gumbel(token, 0, 1, np.uint64(1)) for token in range(4000)])
    assert abs(np.corrcoef(first, other_choice)[0, 1]) < 0.06
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.06
