"""The workload is what the README says, and the same at every run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from benchmarks.workload import Piece, make_workload


class Bytes:
    """An encoding of one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def make(count: int = 400, seed: int = 0) -> list[Piece]:
    return make_workload(Bytes(), count, seed=seed)


def test_lengths_are_heavy_tailed_within_their_bounds() -> None:
    pieces = make()
    prompts, outputs = [len(piece.token_ids) for piece in pieces], [piece.num_output for piece in pieces]
    assert 32 <= min(prompts) < max(prompts) <= 768
    assert 8 <= min(outputs) < max(outputs) <= 256
    assert 55 < mean(outputs) < 70
    assert mean(outputs) > 1.3 * median(outputs)


def test_prompts_are_text_and_begin_differently() -> None:
    pieces = make()
    assert all(Bytes().encode(piece.prompt) == list(piece.token_ids) for piece in pieces)
    assert len({piece.token_ids[:16] for piece in pieces}) > 0.95 * len(pieces)


def test_the_seed_decides() -> None:
    assert make(10) == make(10)
    assert make(10) != make(10, seed=1)
