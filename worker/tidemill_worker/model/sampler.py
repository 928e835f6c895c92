"""From logits to tokens, row by row: what a row draws depends on its own logits and job alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tidemill.jobs import SamplingParams
from tidemill_kernels.gumbel_argmax import gumbel_argmax
from tidemill_worker.model.batch import Generation

INVALID_TOKEN = -1
"""Stands for "the model gave no usable logits here"; never a token of any vocabulary."""


def sample(logits: torch.Tensor, generations: Sequence[Generation]) -> list[int]:
    """Choose one token per row.

    Args:
        logits: float32 `[k, vocabulary]`.
        generations: the `k` sequences the rows belong to.

    Returns:
        One token per row; `INVALID_TOKEN` where the logits hold a NaN or an infinity.
    """
    if not generations:
        return []
    peaks, greedy = logits.max(dim=-1)
    tokens: list[int] = greedy.tolist()
    for row, finite in enumerate(torch.isfinite(peaks).tolist()):
        if not finite:
            tokens[row] = INVALID_TOKEN
        elif generations[row].params.temperature > 0:
            tokens[row] = _draw(logits[row], generations[row])
    return tokens


def _draw(logits: torch.Tensor, generation: Generation) -> int:
    kept, tokens = truncate(logits / generation.params.temperature, generation.params)
    return gumbel_argmax(
        kept.cpu().numpy(),
        tokens.cpu().numpy(),
        np.uint64(generation.seed),
        choice=0,
        index=len(generation.token_ids) - generation.num_prompt_tokens,
    )


def truncate(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply top_k, then top_p over what is left.

    Args:
        logits: `[vocabulary]`, already divided by the temperature.
        params: what to keep.

    Returns:
        The logits that remain and the tokens they belong to, most likely first unless all remain.
    """
    if 0 < params.top_k < logits.numel():
        kept, tokens = torch.topk(logits, params.top_k)
    elif params.top_p < 1:
        kept, tokens = torch.sort(logits, descending=True, stable=True)
    else:
        return logits, torch.arange(logits.numel(), device=logits.device)
    if params.top_p < 1:
        probabilities = torch.softmax(kept, dim=-1)
        mass_before = probabilities.cumsum(dim=-1) - probabilities
        count = max(1, int((mass_before < params.top_p).sum()))
        kept, tokens = kept[:count], tokens[:count]
    return kept, tokens
