"""Executes one planned step on the model: copies, forward, sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tidemill_scheduler.plan import StepPlan
from tidemill_scheduler.sequence import SequenceId
from tidemill_worker.model.batch import Generations, PagedBatch, build_batch
from tidemill_worker.model.kv_cache import copy_blocks
from tidemill_worker.model.logprobs import RankedToken
from tidemill_worker.model.prompt_logprobs import PromptRow, body_runs_once, prompt_rows, rank_prompt
from tidemill_worker.model.sampler import Sampler


@dataclass(frozen=True)
class StepTokens:
    """What the model made of a plan.

    Attributes:
        tokens: the next token of each sequence whose row samples, negative if it has none.
        logprobs: of these tokens, where they were asked for.
        prompt_logprobs: where they were asked for and the row covers positions of the prompt before
            its last: entry i is about the token at position `row.start + 1 + i`.
    """

    tokens: Mapping[SequenceId, int]
    logprobs: Mapping[SequenceId, RankedToken]
    prompt_logprobs: Mapping[SequenceId, Sequence[RankedToken]]


class ModelRunner:
    """The device boundary: plans come in as ints, tokens go out as ints.

    Nothing outside this package touches a tensor. The runner keeps no state of a sequence: what
    it needs is looked up when the step runs, so that a plan may be made before the tokens of the
    plan before it are known.
    """

    def __init__(self, model: PreTrainedModel, kv_cache: torch.Tensor) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._sampler = Sampler()

    @torch.inference_mode()
    def run(self, plan: StepPlan, generations: Generations) -> StepTokens:
        """Run `plan` and draw the next token of each sequence whose row samples."""
        self._copy(plan)
        batch = build_batch(plan, generations, self._kv_cache)
        reported = prompt_rows(plan, generations)
        with body_runs_once(self._model) if reported else nullcontext():
            logits = self.forward(batch)
            prompt_logprobs = self._rank_prompt(batch, reported)
        sampled = self._sampler.sample(logits, [generations[sequence] for sequence in batch.sampled])
        return StepTokens(
            tokens=dict(zip(batch.sampled, sampled.tokens, strict=True)),
            logprobs={batch.sampled[row]: token for row, token in sampled.logprobs.items()},
            prompt_logprobs=prompt_logprobs,
        )

    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """Logits `[k, vocabulary]`, float32, of the rows that sample."""
        return self._logits(batch, batch.sampled_rows)

    def _logits(self, batch: PagedBatch, rows: torch.Tensor) -> torch.Tensor:
        """Logits `[k, vocabulary]`, float32, of the packed rows with these int64 indices `[k]`."""
        output = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=rows,
            paged=batch,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _rank_prompt(
        self, batch: PagedBatch, reported: Sequence[PromptRow]
    ) -> dict[SequenceId, list[RankedToken]]:
        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            return self._logits(batch, rows.to(batch.positions.device))

        vocabulary: int = self._model.config.get_text_config().vocab_size
        return rank_prompt(reported, logits_of, vocabulary=vocabulary)

    def _copy(self, plan: StepPlan) -> None:
        pairs = [(int(copy.source), int(copy.target)) for copy in plan.block_copies]
        if pairs:
            copy_blocks(self._kv_cache, self._kv_cache, pairs)
