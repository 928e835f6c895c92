"""The contract of the call; what it chooses is tested where the sampler is (`tests/worker/model`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidemill_kernels.choose_tokens import NO_TOKEN, ROW, choose_tokens, scratch_bytes


def make_rows(logits: torch.Tensor, **fields: float) -> np.ndarray:
    rows = np.zeros(len(logits), ROW)
    rows["logits"] = logits.data_ptr() + 4 * logits.shape[1] * np.arange(len(logits))
    rows["top_p"] = rows["repetition_penalty"] = 1
    for name, value in fields.items():
        rows[name] = value
    return rows


def make_scratch(vocabulary: int) -> np.ndarray:
    return np.zeros(scratch_bytes(vocabulary) // 8 * torch.get_num_threads(), np.int64)


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 129, 1025])
def test_each_row_gets_its_own_token(vocabulary: int) -> None:
    logits = torch.randn(50, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[7] = -torch.inf
    expected = logits.argmax(dim=1).tolist()
    expected[7] = NO_TOKEN
    assert choose_tokens(make_rows(logits), vocabulary, make_scratch(vocabulary)).tolist() == expected
    # At this temperature the noise does not change the maximum.
    drawn = make_rows(logits, temperature=1e-5, top_k=5, top_p=0.9)
    assert choose_tokens(drawn, vocabulary, make_scratch(vocabulary)).tolist() == expected


def test_scratch_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="too few for 100 tokens"):
        choose_tokens(make_rows(torch.zeros(1, 100)), 100, make_scratch(100)[:-1])


def test_no_rows_are_no_tokens() -> None:
    assert choose_tokens(np.zeros(0, ROW), 100, make_scratch(100)).tolist() == []


def test_nothing_is_written_past_the_scratch() -> None:
    for vocabulary in (1, 63, 64, 65, 1000, 1001):
        size = scratch_bytes(vocabulary) // 8 * torch.get_num_threads()
        scratch = np.full(size + 8, 77, np.int64)
        for spread in (0.0, 3.0):
            logits = torch.randn(8, vocabulary) * spread
            rows = make_rows(logits, temperature=1, min_p=1e-9, top_k=vocabulary - 1, top_p=0.9999999)
            choose_tokens(rows, vocabulary, scratch[:size])
            assert scratch[size:].tolist() == [77] * 8
