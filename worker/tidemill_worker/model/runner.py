"""Executes one planned step on the model: copies, forward, sample."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from tidemill_scheduler.plan import StepPlan
from tidemill_scheduler.sequence import SequenceId
from tidemill_worker.model.batch import Generations, PagedBatch, build_batch
from tidemill_worker.model.kv_cache import copy_blocks
from tidemill_worker.model.sampler import sample


class ModelRunner:
    """The device boundary: plans come in as ints, tokens go out as ints.

    Nothing outside this package touches a tensor. The runner keeps no state of a sequence: what
    it needs is looked up when the step runs, so that a plan may be made before the tokens of the
    plan before it are known.
    """

    def __init__(self, model: PreTrainedModel, kv_cache: torch.Tensor) -> None:
        self._model = model
        self._kv_cache = kv_cache

    @torch.inference_mode()
    def run(self, plan: StepPlan, generations: Generations) -> Mapping[SequenceId, int]:
        """Run `plan` and return the next token of each sequence whose row samples."""
        self._copy(plan)
        batch = build_batch(plan, generations, self._kv_cache)
        logits = self.forward(batch)
        tokens = sample(logits, [generations[sequence] for sequence in batch.sampled])
        return dict(zip(batch.sampled, tokens, strict=True))

    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """Logits `[k, vocabulary]`, float32, of the rows that sample."""
        output = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.sampled_rows,
            paged=batch,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _copy(self, plan: StepPlan) -> None:
        pairs = [(int(copy.source), int(copy.target)) for copy in plan.block_copies]
        if pairs:
            copy_blocks(self._kv_cache, self._kv_cache, pairs)
