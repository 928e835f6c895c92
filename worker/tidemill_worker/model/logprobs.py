"""Log-probabilities as the engine hands them on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tidemill_kernels.rank_tokens import rank_tokens


class RankedToken(NamedTuple):
    """One token among all that could have stood in its place.

    Log-probabilities are of the model's own logits, before anything a job asks for changes them.
    """

    token_id: int
    logprob: float
    """The lowest finite float32 for a token that the model holds impossible."""
    rank: int
    """1 for the most likely."""
    top: tuple[tuple[int, float], ...]
    """(token, logprob) of the most likely ones, as many as were asked for."""


def rank(
    logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]
) -> Iterator[RankedToken]:
    """Rank one token in each of some rows.

    Args:
        logits: contiguous float32 `[k, vocabulary]` on CPU, as the model gave them.
        rows: indices into them.
        tokens: the token of each of these rows.
        num_top: how many of the likeliest tokens to name in each of them.
    """
    vocabulary = logits.shape[1]
    addresses = logits.data_ptr() + 4 * vocabulary * np.array(rows, np.int64)
    most = min(max(num_top, default=0), vocabulary)
    ranks = rank_tokens(addresses, np.array(tokens, np.int64), vocabulary=vocabulary, num_top=most)
    for token, wanted, logprob, place, top_tokens, top_logprobs in zip(
        tokens,
        num_top,
        ranks.logprobs.tolist(),
        ranks.ranks.tolist(),
        ranks.top_tokens.tolist(),
        ranks.top_logprobs.tolist(),
        strict=True,
    ):
        top = tuple(zip(top_tokens[:wanted], top_logprobs[:wanted], strict=True))
        yield RankedToken(token, logprob, place, top)
