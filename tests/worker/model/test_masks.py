from __future__ import annotations

import pytest
import torch
from transformers import masking_utils as masking

from tidemill_worker.model.masks import Rule, rule_of, visible

THREE_WORDS = masking.blockwise_overlay(torch.full((1, 3), -1))
"""Asked of each token, with three tokens at hand: which image it belongs to."""


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (masking.causal_mask_function, range(51)),
        (masking.bidirectional_mask_function, range(64)),
        (masking.sliding_window_causal_mask_function(7), range(44, 51)),
        (masking.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), range(48, 51)),
        (masking.or_masks(masking.causal_mask_function, THREE_WORDS), range(51)),
    ],
)
def test_a_rule_is_asked_about_a_position_far_from_any_token(rule: Rule, expected: range) -> None:
    seen = visible(rule, 50, torch.arange(64))
    assert seen.nonzero().flatten().tolist() == list(expected)


def test_a_mask_of_unknown_origin_has_no_rule() -> None:
    assert rule_of(None) is None
    assert rule_of(torch.zeros(3, 3)) is None
