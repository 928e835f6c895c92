"""Which tokens a generation has seen, and how often it has generated each: what penalties are about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class SeenTokens:
    """Counts the tokens of an output as it grows; a step costs the tokens that it brought."""

    def __init__(self, num_prompt_tokens: int, prompt_token_ids: Sequence[int] = ()) -> None:
        """Begin with `prompt_token_ids` seen and nothing generated.

        Args:
            num_prompt_tokens: where the output begins in the sequences to come.
            prompt_token_ids: empty where the prompt does not count as seen.
        """
        unique = np.unique(np.array(prompt_token_ids, np.int32))
        self._num_known = num_prompt_tokens
        self._slots = {token: slot for slot, token in enumerate(unique.tolist())}
        self._tokens = np.concatenate([unique, np.zeros(64, np.int32)])
        self._counts = np.zeros_like(self._tokens)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Each token that was seen, once."""
        return self._tokens[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often each of `tokens` was generated."""
        return self._counts[: len(self._slots)]

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Take in what the sequence `token_ids` has generated since the last call."""
        for token in token_ids[self._num_known :]:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._tokens):
                self._grow()
            self._tokens[slot] = token
            self._counts[slot] += 1
        self._num_known = len(token_ids)

    def _grow(self) -> None:
        self._tokens, self._counts = (
            np.concatenate([array, np.zeros_like(array)]) for array in (self._tokens, self._counts)
        )
