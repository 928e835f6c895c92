"""What penalties count: each token of the output, and which tokens there were at all."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tidemill_worker.model.seen_tokens import SeenTokens


def counted(seen: SeenTokens) -> dict[int, int]:
    assert len(set(seen.tokens.tolist())) == len(seen.tokens)
    return dict(zip(seen.tokens.tolist(), seen.counts.tolist(), strict=True))


def test_the_prompt_is_seen_but_not_counted() -> None:
    seen = SeenTokens(3, [8, 5, 8])
    assert counted(seen) == {5: 0, 8: 0}
    seen.catch_up([8, 5, 8, 5, 9, 9])
    assert counted(seen) == {5: 1, 8: 0, 9: 2}


def test_a_prompt_that_does_not_count_leaves_no_trace() -> None:
    seen = SeenTokens(3)
    seen.catch_up([8, 5, 8, 5])
    assert counted(seen) == {5: 1}


@pytest.mark.parametrize("step", [1, 2, 7, 600])
def test_catching_up_in_any_steps_counts_the_same(step: int) -> None:
    dice = random.Random(0)
    token_ids = [dice.randrange(300) for _ in range(600)]
    seen = SeenTokens(10, token_ids[:10])
    for stop in range(10, 601, step):
        seen.catch_up(token_ids[:stop])
    seen.catch_up(token_ids)
    seen.catch_up(token_ids)
    assert counted(seen) == dict.fromkeys(token_ids[:10], 0) | Counter(token_ids[10:])
