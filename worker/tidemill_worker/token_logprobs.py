"""Log-probabilities on their way from the engine, which knows tokens by number, to the wire and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tidemill.jobs import TokenLogprobs
from tidemill_worker.generation import RankedToken

TokenText = Callable[[int], tuple[str, tuple[int, ...] | None]]
"""A token's text alone, and its bytes where these are not whole UTF-8 by themselves."""

LOGPROB_BYTES = 70
"""What JSON takes for the log-probability of one token: about."""

LEAST = -9999.0
"""Stands for the logarithm of a probability of 0, which JSON cannot say; OpenAI's number for it."""


@dataclass(frozen=True, slots=True)
class StoredToken:
    """A `RankedToken` read back from the wire."""

    token_id: int
    logprob: float
    rank: int
    top: Sequence[tuple[int, float]]

    @classmethod
    def of(cls, stored: TokenLogprobs) -> StoredToken:
        """Inverse of `on_wire`: the numbers are the same to the last bit."""
        top = tuple((likely.token_id, likely.logprob) for likely in stored.top)
        return cls(stored.token_id, stored.logprob, stored.rank, top)


def on_wire(ranked: Iterable[RankedToken], token_text: TokenText) -> tuple[TokenLogprobs, ...]:
    """What a delta or a result says about these tokens."""
    return tuple(_on_wire(token, token_text) for token in ranked)


def logprob_bytes(ranked: Sequence[RankedToken]) -> int:
    """About what these take in JSON; all have as many likeliest tokens beside them as the first has."""
    return LOGPROB_BYTES * len(ranked) * (1 + len(ranked[0].top)) if ranked else 0


def _on_wire(ranked: RankedToken, token_text: TokenText) -> TokenLogprobs:
    # One validation of nested dicts takes 0.8 us for each of 21 entries; one model after the other, 2.4.
    values = _described(ranked.token_id, ranked.logprob, ranked.rank, token_text)
    values["top"] = [
        _described(token_id, logprob, rank, token_text)
        for rank, (token_id, logprob) in enumerate(ranked.top, start=1)
    ]
    return TokenLogprobs.model_validate(values)


def _described(token_id: int, logprob: float, rank: int, token_text: TokenText) -> dict[str, object]:
    text, raw = token_text(token_id)
    return {
        "token_id": token_id,
        "logprob": max(LEAST, logprob),
        "rank": rank,
        "token": text,
        "bytes": raw,
    }
