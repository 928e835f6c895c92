"""Our logits against transformers' own eager forward, fed with our output."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.worker.model.factories import Rows


@functools.lru_cache(maxsize=1)
def load_reference(folder: Path) -> PreTrainedModel:
    """The model in `folder` as transformers itself runs it; the last one is kept."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model


def assert_agrees(
    folder: Path,
    prompts: Mapping[str, Sequence[int]],
    tokens: Mapping[str, Sequence[int]],
    rows: Rows,
    *,
    relative: float = 1e-4,
    near_maximum: float = 1e-3,
) -> None:
    """Every row within `relative` of the logits' standard deviation, every greedy token within
    `near_maximum` of the largest logit.
    """
    reference = load_reference(folder)
    for name, prompt in prompts.items():
        with torch.inference_mode():
            logits = reference(
                torch.tensor([[*prompt, *tokens[name]]]),
                use_cache=False,
                logits_to_keep=len(tokens[name]) + 1,
            ).logits[0]
        expected = logits[:-1]
        ours = torch.stack([rows[name, index] for index in range(len(tokens[name]))])
        worst = float((ours - expected).abs().max() / expected.std())
        assert worst <= relative, f"{name}: {worst:.1e} of the standard deviation"
        chosen = expected.gather(1, torch.tensor(tokens[name]).unsqueeze(1)).squeeze(1)
        gap = float((expected.max(dim=-1).values - chosen).max())
        assert gap <= near_maximum, f"{name}: a greedy token is {gap:.1e} below the maximum"
