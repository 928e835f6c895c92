"""Log-probabilities, ranks and likeliest tokens, against a softmax in float64 and a sort."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tidemill_kernels.rank_tokens import LOWEST, Ranks, rank_tokens


def ranks_of(logits: NDArray[np.float32], tokens: list[int], num_top: int = 0) -> Ranks:
    count, vocabulary = logits.shape
    rows = logits.ctypes.data + 4 * vocabulary * np.arange(count)
    return rank_tokens(rows, np.array(tokens), vocabulary=vocabulary, num_top=num_top)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("vocabulary", [1, 20, 63, 64, 65, 1000, 5000])
def test_logprobs_ranks_and_top_tokens_are_what_they_are_called(vocabulary: int, threads: None) -> None:
    generator = np.random.default_rng(vocabulary)
    logits = (generator.standard_normal((12, vocabulary)) * 4).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # with ties
    tokens = generator.integers(0, vocabulary, 12).tolist()
    num_top = min(20, vocabulary)
    ranks, expected = ranks_of(logits, tokens, num_top), log_softmax(logits)
    for row, token in enumerate(tokens):
        assert ranks.logprobs[row] == pytest.approx(expected[row, token], abs=3e-6)
        assert ranks.ranks[row] == 1 + np.sum(logits[row] > logits[row, token])
        best = np.lexsort((np.arange(vocabulary), -logits[row]))[:num_top]
        assert ranks.top_tokens[row].tolist() == best.tolist()
        assert ranks.top_logprobs[row] == pytest.approx(expected[row, best], abs=3e-6)


def test_by_hand() -> None:
    ranks = ranks_of(np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)), [1], num_top=2)
    assert ranks.logprobs[0] == pytest.approx(np.log(0.2), abs=1e-6)
    assert ranks.ranks[0] == 3
    assert ranks.top_tokens[0].tolist() == [3, 2]
    assert ranks.top_logprobs[0] == pytest.approx(np.log([0.4, 0.3]), abs=1e-6)


def test_a_row_has_the_same_bits_alone_and_in_a_crowd(threads: None) -> None:
    logits = (np.random.default_rng(0).standard_normal((9, 3001)) * 3).astype(np.float32)
    tokens = list(range(9))
    together = ranks_of(logits, tokens, 5)
    for row in range(9):
        alone = ranks_of(logits[row : row + 1].copy(), [row], 5)
        assert alone.logprobs[0] == together.logprobs[row]
        assert np.array_equal(alone.top_logprobs[0], together.top_logprobs[row])


def test_the_token_and_the_top_agree_to_the_bit() -> None:
    logits = (np.random.default_rng(1).standard_normal((1, 777)) * 3).astype(np.float32)
    ranks = ranks_of(logits, [int(logits.argmax())], 1)
    assert ranks.ranks[0] == 1
    assert ranks.top_logprobs[0, 0] == ranks.logprobs[0]


def test_small_probabilities_count_in_the_sum() -> None:
    # 200,000 tokens of 2^-26 of the likeliest one's probability are 0.3 % of all.
    logits = np.full((1, 200_001), -26 * np.log(2), np.float32)
    logits[0, 77] = 0.0
    assert ranks_of(logits, [77]).logprobs[0] == pytest.approx(-np.log1p(200_000 * 2.0**-26), rel=1e-4)


def test_impossible_tokens_have_the_lowest_finite_logprob() -> None:
    ranks = ranks_of(np.array([[0.0, -np.inf, -np.inf]], np.float32), [2], 2)
    assert ranks.logprobs[0] == LOWEST
    assert ranks.ranks[0] == 2
    assert ranks.top_logprobs[0].tolist() == [0.0, LOWEST]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_unusable_logits_stay_in_their_row(bad: float) -> None:
    logits = np.array([[0.0, bad, 1.0], [0.0, 0.0, 0.0]], np.float32)
    ranks = ranks_of(logits, [0, 0], 2)
    assert ranks.logprobs[0] == LOWEST
    assert ranks.top_logprobs[0].tolist() == [LOWEST, LOWEST]
    assert ranks.logprobs[1] == pytest.approx(-np.log(3), abs=1e-6)
