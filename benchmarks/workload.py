"""What the benchmarks share: the engine's settings, and a heavy-tailed workload of real English."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Protocol

FLAGS = {
    "device": "cpu",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "kv_cache_memory": 2.0,
    "enable_prefix_caching": False,  # every round brings the same prompts
    "metrics_port": 0,
}
PROMPT_TOKENS = (32, 768)
OUTPUT_TOKENS = (8, 256)


class Encoding(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Piece:
    """One request: a prompt, and how many tokens to generate after it."""

    prompt: str
    token_ids: tuple[int, ...]
    num_output: int


@dataclass(frozen=True)
class LogNormal:
    """A length in tokens, log-normal and cut off at its bounds: most are short, a few are very long."""

    median: float
    sigma: float
    bounds: tuple[int, int]

    def __post_init__(self) -> None:
        if self.median <= 0 or self.sigma < 0:
            raise ValueError(f"median is {self.median}, must be above 0; sigma is {self.sigma}, at least 0")
        if not 1 <= self.bounds[0] <= self.bounds[1]:
            raise ValueError(f"bounds are {self.bounds}, must be at least 1 and in order")

    def draw(self, dice: random.Random) -> int:
        low, high = self.bounds
        return min(max(round(self.median * dice.lognormvariate(0.0, self.sigma)), low), high)


@dataclass(frozen=True)
class Lengths:
    """How long the prompts and the outputs of a workload are."""

    prompt: LogNormal
    output: LogNormal


DOCUMENTS = Lengths(LogNormal(180, 0.8, PROMPT_TOKENS), LogNormal(42, 0.95, OUTPUT_TOKENS))
"""Prompts of 32 to 768 tokens, outputs of 8 to 256, mean about 64."""
CHAT = Lengths(LogNormal(24, 0.9, (8, 512)), LogNormal(16, 1.2, (1, 256)))
"""Prompts of 8 to 512 tokens, outputs of 1 to 256, mean about 30 of each."""


def make_workload(
    encoding: Encoding, count: int, *, seed: int = 0, lengths: Lengths = DOCUMENTS
) -> list[Piece]:
    """Draw `count` requests.

    The text is Python's own reference manual, each prompt from another place of it, so that no two
    begin alike.
    """
    dice = random.Random(seed)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    pieces = []
    for _ in range(count):
        num_prompt, num_output = lengths.prompt.draw(dice), lengths.output.draw(dice)
        start = dice.randrange(len(text) - 8 * PROMPT_TOKENS[1])
        token_ids = encoding.encode(text[start : start + 8 * num_prompt])[:num_prompt]
        prompt = encoding.decode(token_ids)
        pieces.append(Piece(prompt, tuple(encoding.encode(prompt)), num_output))
    return pieces
