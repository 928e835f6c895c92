"""What one generation asks of the sampling kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidemill_kernels.choose_tokens import ROW
from tidemill_worker.model.bans import OUTSIDE, Bans, as_tokens
from tidemill_worker.model.batch import Generation
from tidemill_worker.model.seen_tokens import SeenTokens

GREEDY_BELOW = 1e-5
"""Temperatures below mean greedy, as they do in vLLM."""


class SamplingRow:
    """Keeps a generation's `ROW` up to date, and what its addresses name alive.

    It holds nothing that the generation does not say: it can be thrown away and made anew.
    """

    def __init__(self, generation: Generation) -> None:
        self._row = np.zeros(1, ROW)
        self._bans = _bans(generation)
        self._seen = _seen(generation)
        self._biased = as_tokens(generation.params.logit_bias)
        self._biases = np.array(list(generation.params.logit_bias.values()), np.float32)
        self._banned = as_tokens(())
        self._allowed: NDArray[np.uint32] | None = None
        self._set_constants(generation)

    @classmethod
    def of(cls, generation: Generation) -> SamplingRow:
        """The row that this generation keeps; if it has none, it gets one."""
        row = generation.sampler_state
        if not isinstance(row, cls):
            row = generation.sampler_state = cls(generation)
        return row

    def advance(self, generation: Generation) -> NDArray[np.void]:
        """The `ROW` `[1]` for the next token, but for the address of its logits; good until the next call.

        Waits for the thread that works out what the grammar allows, if there is a grammar.
        """
        row, token_ids = self._row, generation.token_ids
        row["index"] = len(token_ids) - generation.num_prompt_tokens
        if self._bans is not None:
            self._banned = self._bans.now(token_ids, len(token_ids) - generation.num_prompt_tokens)
            row["banned"], row["num_banned"] = self._banned.ctypes.data, len(self._banned)
        if self._seen is not None:
            self._seen.catch_up(token_ids)
            tokens, counts = self._seen.tokens, self._seen.counts
            row["seen"], row["counts"], row["num_seen"] = tokens.ctypes.data, counts.ctypes.data, len(tokens)
        allowed = generation.allowed_tokens()
        if allowed is not None:
            self._allowed = np.ascontiguousarray(allowed, np.uint32)
            row["allowed"], row["allowed_words"] = self._allowed.ctypes.data, len(self._allowed)
        return row

    def _set_constants(self, generation: Generation) -> None:
        row, params = self._row, generation.params
        row["biased"], row["biases"] = self._biased.ctypes.data, self._biases.ctypes.data
        row["num_biased"] = len(self._biased)
        row["seed"], row["choice"] = generation.seed, generation.choice
        row["temperature"] = params.temperature if params.temperature >= GREEDY_BELOW else 0.0
        row["top_k"], row["top_p"], row["min_p"] = min(params.top_k, OUTSIDE), params.top_p, params.min_p
        row["repetition_penalty"] = params.repetition_penalty
        row["frequency_penalty"] = params.frequency_penalty
        row["presence_penalty"] = params.presence_penalty


def is_edited(rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which of these `ROW`s change logits, so that a greedy one's answer is not the greatest as it stands."""
    edits: NDArray[np.bool_] = (rows["allowed"] != 0) | (
        rows["num_banned"] + rows["num_biased"] + rows["num_seen"] > 0
    )
    return edits


def _bans(generation: Generation) -> Bans | None:
    if not generation.bad_words and generation.params.min_tokens == 0:
        return None
    return Bans(generation.bad_words, generation.end_tokens, generation.params.min_tokens)


def _seen(generation: Generation) -> SeenTokens | None:
    params, num_prompt_tokens = generation.params, generation.num_prompt_tokens
    if params.repetition_penalty != 1:
        return SeenTokens(num_prompt_tokens, generation.token_ids[:num_prompt_tokens])
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        return SeenTokens(num_prompt_tokens)
    return None
