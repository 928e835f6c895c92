"""Which tokens may not come next: those that complete a bad word, or that would end it all too early."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

OUTSIDE = 2**31 - 1
"""Stands for any token id beyond every vocabulary, of which a job may name as large a one as it likes."""


def as_tokens(values: Iterable[int]) -> NDArray[np.int32]:
    """Token ids as the sampling kernel reads them."""
    return np.array([min(value, OUTSIDE) for value in values], np.int32)


class Bans:
    """What one generation may not draw.

    A bad word is a sequence of tokens. vLLM's rule: its last token is banned where the output ends
    with all that comes before it; the prompt does not count. If it is a single token, it is banned
    throughout. End tokens are banned until there are `min_tokens` of output.
    """

    def __init__(
        self, bad_words: Sequence[Sequence[int]], end_tokens: Collection[int], min_tokens: int
    ) -> None:
        single = [word[0] for word in bad_words if len(word) == 1]
        self._min_tokens = min_tokens
        self._always = as_tokens(single)
        self._early = as_tokens([*single, *(end_tokens if min_tokens > 0 else ())])
        self._by_tail: dict[int, list[tuple[list[int], int]]] = {}
        for word in bad_words:
            if len(word) > 1:
                *beginning, last = word
                self._by_tail.setdefault(beginning[-1], []).append((beginning, last))

    def now(self, token_ids: Sequence[int], num_output_tokens: int) -> NDArray[np.int32]:
        """The tokens that may not follow on `token_ids`, whose last `num_output_tokens` are output."""
        banned = self._early if num_output_tokens < self._min_tokens else self._always
        completing = self._completing(token_ids, num_output_tokens)
        return np.concatenate([banned, as_tokens(completing)]) if completing else banned

    def _completing(self, token_ids: Sequence[int], num_output_tokens: int) -> list[int]:
        if num_output_tokens == 0:
            return []
        return [
            last
            for beginning, last in self._by_tail.get(token_ids[-1], ())
            if len(beginning) <= num_output_tokens and list(token_ids[-len(beginning) :]) == beginning
        ]
