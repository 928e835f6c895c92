"""How likely the tokens of a prompt were, without the logits of a long one ever being in memory together.

What follows a model's body (the product with the vocabulary, a softcap, a scale) is written inside
each architecture's own forward. So the body runs once, and the forward is called again for some
rows at a time with a body that gives back what it gave before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from tidemill.errors import ModelUnsupported
from tidemill_scheduler.plan import StepPlan
from tidemill_scheduler.sequence import SequenceId
from tidemill_worker.model.batch import Generations
from tidemill_worker.model.logprobs import RankedToken, rank

LOGIT_BYTES = 64 << 20
"""Most that the logits looked at together may take: 341 rows over 49,152 tokens, 64 over 262,144.
With so many rows the product is bound by arithmetic already: more would not be faster."""


@dataclass(frozen=True)
class PromptRow:
    """A packed row whose logits say how likely a token of the prompt was.

    Attributes:
        sequence: whose prompt it is.
        row: index among the packed tokens.
        token: the prompt token that came next.
        num_top: how many of the likeliest tokens to report beside it.
    """

    sequence: SequenceId
    row: int
    token: int
    num_top: int


def prompt_rows(plan: StepPlan, generations: Generations) -> list[PromptRow]:
    """The rows of `plan` whose next token is one of a prompt that is to be reported on."""
    rows: list[PromptRow] = []
    first = 0
    for row in plan.rows:
        generation = generations[row.sequence]
        num_top = generation.num_prompt_logprobs
        if num_top is not None:
            stop = min(row.start + row.count, generation.num_prompt_tokens - 1)
            following = generation.token_ids[row.start + 1 : stop + 1] if row.start < stop else ()
            rows += [PromptRow(row.sequence, first + i, token, num_top) for i, token in enumerate(following)]
        first += row.count
    return rows


def rank_prompt(
    rows: Sequence[PromptRow], logits_of: Callable[[torch.Tensor], torch.Tensor], *, vocabulary: int
) -> dict[SequenceId, list[RankedToken]]:
    """Rank the prompt tokens that follow on `rows`, in their order.

    Args:
        rows: what to report on.
        logits_of: gives float32 `[k, vocabulary]` for int64 indices `[k]` of packed rows.
        vocabulary: logits in a row.
    """
    together = max(LOGIT_BYTES // (4 * vocabulary), 1)
    found: dict[SequenceId, list[RankedToken]] = {}
    for first in range(0, len(rows), together):
        some = rows[first : first + together]
        logits = logits_of(torch.tensor([row.row for row in some])).cpu().contiguous()
        tokens, num_top = [row.token for row in some], [row.num_top for row in some]
        for row, token in zip(some, rank(logits, range(len(some)), tokens, num_top), strict=True):
            found.setdefault(row.sequence, []).append(token)
    return found


@contextmanager
def body_runs_once(model: PreTrainedModel) -> Iterator[None]:
    """Within, the first forward call of `model` runs its body, and all others are given its output."""
    body = _body(model)
    forward = body.forward
    outputs: list[Any] = []

    def forward_once(*args: Any, **kwargs: Any) -> Any:
        if not outputs:
            outputs.append(forward(*args, **kwargs))
        return outputs[0]

    body.forward = forward_once
    try:
        yield
    finally:
        body.forward = forward


def _body(model: PreTrainedModel) -> Module:
    """All of `model` but its head.

    Raises:
        ModelUnsupported: if it is not a module of its own.
    """
    decoder: Module = model.get_decoder()
    if decoder is model.get_output_embeddings():  # modernbert-decoder calls it that
        decoder = model.base_model
    if decoder is model:
        raise ModelUnsupported(f"model: {type(model).__name__} has no body apart from its head")
    return decoder
