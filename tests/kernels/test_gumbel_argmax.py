"""The noise: Philox as published, and a search that skips only what cannot win."""

from __future__ import annotations

import numpy as np
import pytest

from tidemill_kernels.gumbel_argmax import MAX_GUMBEL, gumbel, gumbel_argmax, philox4x32

WORD = 0xFFFFFFFF


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


def test_the_search_finds_what_a_full_search_finds() -> None:
    generator = np.random.default_rng(0)
    tokens = np.arange(3000)
    for index in range(30):
        logits = (generator.standard_normal(3000) * 8).astype(np.float32)
        perturbed = [
            float(x) + gumbel(t, index, 0, np.uint64(5)) for x, t in zip(logits, tokens, strict=True)
        ]
        assert gumbel_argmax(logits, tokens, np.uint64(5), 0, index) == int(np.argmax(perturbed))


def test_the_noise_stays_below_its_bound_and_has_its_moments() -> None:
    noise = np.array([gumbel(token, 3, 0, np.uint64(11)) for token in range(20_000)])
    assert noise.max() < MAX_GUMBEL
    assert noise.mean() == pytest.approx(0.5772, abs=0.05)
    assert noise.std() == pytest.approx(np.pi / 6**0.5, abs=0.05)


def test_choices_and_neighbouring_tokens_are_independent() -> None:
    first = np.array([gumbel(token, 0, 0, np.uint64(1)) for token in range(4000)])
    other_choice = np.array([gumbel(token, 0, 1, np.uint64(1)) for token in range(4000)])
    assert abs(np.corrcoef(first, other_choice)[0, 1]) < 0.06
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.06


def test_the_order_of_the_candidates_does_not_matter() -> None:
    generator = np.random.default_rng(1)
    logits = generator.standard_normal(500).astype(np.float32)
    tokens = np.arange(500)
    shuffled = generator.permutation(500)
    for index in range(20):
        assert gumbel_argmax(logits, tokens, np.uint64(9), 0, index) == gumbel_argmax(
            logits[shuffled], tokens[shuffled], np.uint64(9), 0, index
        )
