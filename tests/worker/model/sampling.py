"""A generation without an engine, and a sampler so plain that one can see that it is right."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill.params import SamplingParams
from tidemill_kernels.gumbel_argmax import gumbel
from tidemill_worker.model.sampler import Sampled, Sampler

Doubles = NDArray[np.float64]


@dataclass
class Drawn:
    """A generation that has some prompt, some output, and draws its next token."""

    params: SamplingParams = field(default_factory=SamplingParams)
    output: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=lambda: [0, 0, 0])
    seed: int = 7
    choice: int = 0
    end_tokens: Collection[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    allowed: Collection[int] | None = None
    """Tokens that the grammar lets come next; `None` if there is no grammar."""
    mask_words: int = 4
    """Length of the grammar's mask."""
    num_prompt_logprobs: int | None = None
    sampler_state: object | None = None

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.output]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    def allowed_tokens(self) -> NDArray[np.uint32] | None:
        if self.allowed is None:
            return None
        mask = np.zeros(self.mask_words, np.uint32)
        for token in self.allowed:
            if token < 32 * self.mask_words:
                mask[token // 32] |= np.uint32(1 << token % 32)
        return mask


def drawn(num_output: int = 0, **params: object) -> Drawn:
    """A generation with these parameters and `num_output` tokens of output."""
    return Drawn(SamplingParams.model_validate(params), output=[0] * num_output)


def sample(logits: torch.Tensor, generations: Sequence[Drawn]) -> list[int]:
    return Sampler().sample(logits, generations).tokens


def sample_full(logits: torch.Tensor, generations: Sequence[Drawn]) -> Sampled:
    return Sampler().sample(logits, generations)


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def reference_token(logits: NDArray[np.float32], row: Drawn) -> int:
    """What the row must draw, by definition; -1 if there is nothing to draw from."""
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return -1
    x = reference_edits(logits, row)
    if x.max() == -np.inf:
        return -1
    if row.params.temperature == 0:
        return int(x.argmax())
    x = reference_truncation(x / row.params.temperature, row.params)
    noise = [gumbel(token, len(row.output), row.choice, np.uint64(row.seed)) for token in range(len(x))]
    return int((x + noise).argmax())


def reference_edits(logits: NDArray[np.float32], row: Drawn) -> Doubles:
    """Mask, bans, bias and penalties; the mask alone where bans leave nothing of what it allows."""
    masked = logits.astype(np.float64)
    for token in range(len(masked)):
        if row.allowed is not None and (token not in row.allowed or token >= 32 * row.mask_words):
            masked[token] = -np.inf
    edited = _reference_bans_and_penalties(masked.copy(), row)
    return masked if row.allowed is not None and edited.max() == -np.inf else edited


def _reference_bans_and_penalties(x: Doubles, row: Drawn) -> Doubles:
    params = row.params
    for token in range(len(x)):
        if len(row.output) < params.min_tokens and token in row.end_tokens:
            x[token] = -np.inf
        if any(_completes(word, row.output, token) for word in row.bad_words):
            x[token] = -np.inf
        x[token] += params.logit_bias.get(token, 0.0)
        if token in row.prompt or token in row.output:
            x[token] *= 1 / params.repetition_penalty if x[token] > 0 else params.repetition_penalty
        count = row.output.count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return x


def _completes(word: Sequence[int], output: Sequence[int], token: int) -> bool:
    text = [*output, token]
    return len(text) >= len(word) and list(text[-len(word) :]) == list(word)


def reference_truncation(x: Doubles, params: SamplingParams) -> Doubles:
    """min_p, top_k and top_p over a sorted copy; equal logits in the order of their ids."""
    x = np.where(np.exp(x - x.max()) >= params.min_p, x, -np.inf)
    order = np.lexsort((np.arange(len(x)), -x))
    if 0 < params.top_k < len(x):
        x[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        weights = np.exp(x[order] - x.max())
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        x[order[before >= params.top_p * weights.sum()]] = -np.inf
    return x
