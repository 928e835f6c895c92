"""From logits to tokens, row by row: what a row draws depends on its own logits and job alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill_kernels.choose_tokens import (
    NO_TOKEN,
    ROW,
    choose_tokens,
    compile_choose_tokens,
    scratch_bytes,
)
from tidemill_kernels.rank_tokens import compile_rank_tokens
from tidemill_worker.model.batch import Generation
from tidemill_worker.model.logprobs import RankedToken, rank
from tidemill_worker.model.sampling_row import SamplingRow, is_edited

INVALID_TOKEN = NO_TOKEN
"""Stands for "no token can be chosen here"; never a token of any vocabulary."""


@dataclass(frozen=True)
class Sampled:
    """What was drawn.

    Attributes:
        tokens: one for each row; `INVALID_TOKEN` where the logits hold a NaN or +inf, or where every
            token is impossible by the logits or by what the job forbids.
        logprobs: by row, where the job asks for them and there is a token.
    """

    tokens: list[int]
    logprobs: dict[int, RankedToken]


class Sampler:
    """Chooses tokens on the CPU; of a GPU's logits it fetches only those that a maximum cannot settle."""

    def __init__(self) -> None:
        compile_choose_tokens()
        compile_rank_tokens()
        self._scratch = np.empty(0, np.int64)

    def sample(self, logits: torch.Tensor, generations: Sequence[Generation]) -> Sampled:
        """Choose one token for each row; the logits stay as they are.

        Args:
            logits: float32 `[k, vocabulary]`.
            generations: the `k` generations that the rows belong to.
        """
        rows = np.empty(len(generations), ROW)
        for index, generation in enumerate(generations):
            rows[index] = SamplingRow.of(generation).advance(generation)[0]
        if not generations:
            return Sampled([], {})
        if logits.device.type != "cpu":
            return self._sample_fetching(logits, rows, generations)
        logits = logits.contiguous()
        tokens = self._choose(logits, rows)
        return Sampled(tokens, _logprobs(logits, tokens, generations))

    def _sample_fetching(
        self, logits: torch.Tensor, rows: NDArray[np.void], generations: Sequence[Generation]
    ) -> Sampled:
        """The same where logits are far away: greedy rows stay there, all others come in one transfer."""
        asks_logprobs = np.array([generation.params.logprobs is not None for generation in generations])
        fetched = np.flatnonzero((rows["temperature"] > 0) | is_edited(rows) | asks_logprobs).tolist()
        tokens = _greatest(logits) if len(fetched) < len(rows) else [INVALID_TOKEN] * len(rows)
        if not fetched:
            return Sampled(tokens, {})
        near = logits[torch.tensor(fetched, device=logits.device)].cpu()
        chosen = self._choose(near, rows[fetched])
        logprobs = _logprobs(near, chosen, [generations[index] for index in fetched])
        for index, token in zip(fetched, chosen, strict=True):
            tokens[index] = token
        return Sampled(tokens, {fetched[index]: ranked for index, ranked in logprobs.items()})

    def _choose(self, logits: torch.Tensor, rows: NDArray[np.void]) -> list[int]:
        """One token for each row of contiguous logits on the CPU."""
        count, vocabulary = logits.shape
        size = scratch_bytes(vocabulary) // 8 * torch.get_num_threads()
        if len(self._scratch) < size:
            self._scratch = np.empty(size, np.int64)
        rows["logits"] = logits.data_ptr() + 4 * vocabulary * np.arange(count)
        tokens: list[int] = choose_tokens(rows, vocabulary, self._scratch).tolist()
        return tokens


def _greatest(logits: torch.Tensor) -> list[int]:
    """The tokens with the greatest logits; `INVALID_TOKEN` where these are not finite."""
    peaks, tokens = logits.max(dim=-1)
    greatest: list[int] = torch.where(torch.isfinite(peaks), tokens, INVALID_TOKEN).tolist()
    return greatest


def _logprobs(
    logits: torch.Tensor, tokens: Sequence[int], generations: Sequence[Generation]
) -> dict[int, RankedToken]:
    """By row, for the rows that ask for them and have a token."""
    num_top = {
        index: generation.params.logprobs
        for index, (token, generation) in enumerate(zip(tokens, generations, strict=True))
        if generation.params.logprobs is not None and token != INVALID_TOKEN
    }
    if not num_top:
        return {}
    chosen = [tokens[index] for index in num_top]
    return dict(zip(num_top, rank(logits, list(num_top), chosen, list(num_top.values())), strict=True))
