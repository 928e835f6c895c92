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


def make_workload(encoding: Encoding, count: int, *, seed: int = 0) -> list[Piece]:
    """Draw `count` requests: prompts of 32 to 768 tokens, outputs of 8 to 256, mean about 64.

    Both lengths are log-normal, cut off at their bounds: most are short, a few are very long. The
    text is Python's own reference manual, each prompt from another place of it, so that no two
    begin alike.
    """
    dice = random.Random(seed)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    pieces = []
    for _ in range(count):
        num_prompt = _log_normal(dice, median=180, sigma=0.8, bounds=PROMPT_TOKENS)
        num_output = _log_normal(dice, median=42, sigma=0.95, bounds=OUTPUT_TOKENS)
        start = dice.randrange(len(text) - 8 * PROMPT_TOKENS[1])
        token_ids = encoding.encode(text[start : start + 8 * num_prompt])[:num_prompt]
        prompt = encoding.decode(token_ids)
        pieces.append(Piece(prompt, tuple(encoding.encode(prompt)), num_output))
    return pieces


def _log_normal(dice: random.Random, *, median: float, sigma: float, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return min(max(round(median * dice.lognormvariate(0.0, sigma)), low), high)
