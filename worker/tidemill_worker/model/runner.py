"""Executes one planned step on the model: copies, forward, sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from transformers import PreTrainedModel

from tidemill.params import SamplingParams
from tidemill_scheduler.costs import RestoreCosts
from tidemill_scheduler.plan import BlockCopy, Row, StepPlan
from tidemill_scheduler.sequence import BlockId, SequenceId
from tidemill_worker.model.architecture import context_length, vocabulary_size
from tidemill_worker.model.batch import Generations, PagedBatch, build_batch
from tidemill_worker.model.kv_cache import copy_blocks
from tidemill_worker.model.lap import laps_of
from tidemill_worker.model.logprobs import RankedToken
from tidemill_worker.model.probe import Prompt
from tidemill_worker.model.prompt_logprobs import PromptRow, body_runs_once, prompt_rows, rank_prompt
from tidemill_worker.model.restore_speeds import RestoreSpeeds
from tidemill_worker.model.sampler import Sampler
from tidemill_worker.model.swapper import make_swapper

MEASURED_BLOCKS = 16
"""Copied each way to measure the speed of copies: one piece, as large as those of a long prompt."""
MEASURED_TOKENS = 2048
"""Computed at most to measure the speed of a prefill: as many as a step has by default on a GPU. Without
chunked prefill a step may be as long as the model's context: a start on CPU would compute for minutes."""


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

    def __init__(
        self, model: PreTrainedModel, kv_cache: torch.Tensor, swap_space: torch.Tensor | None = None
    ) -> None:
        if swap_space is None:
            swap_space = kv_cache.new_empty((0, *kv_cache.shape[1:]), device="cpu")
        self._model = model
        self._kv_cache = kv_cache
        self._swap_space = swap_space
        self._speeds = RestoreSpeeds(laps_of(kv_cache.device))
        self._swapper = make_swapper(kv_cache, swap_space, self._speeds)
        self._sampler = Sampler()

    @property
    def costs(self) -> RestoreCosts:
        """What restoring a preempted sequence costs, as measured by `measure_costs` and corrected since."""
        return self._speeds.costs

    @torch.inference_mode()
    def run(self, plan: StepPlan, generations: Generations) -> StepTokens:
        """Run `plan` and draw the next token of each sequence whose row samples."""
        self._copy(plan)
        if not plan.rows:
            return StepTokens({}, {}, {})
        batch = build_batch(plan, generations, self._kv_cache)
        reported = prompt_rows(plan, generations)
        with body_runs_once(self._model) if reported else nullcontext():
            with self._speeds.computing(plan.rows):
                logits = self.forward(batch)
            prompt_logprobs = self._rank_prompt(batch, reported)
        sampled = self._sampler.sample(logits, [generations[sequence] for sequence in batch.sampled])
        return StepTokens(
            tokens=dict(zip(batch.sampled, sampled.tokens, strict=True)),
            logprobs={batch.sampled[row]: token for row, token in sampled.logprobs.items()},
            prompt_logprobs=prompt_logprobs,
        )

    @torch.inference_mode()
    def measure_costs(self, max_tokens: int) -> None:
        """Time a prefill chunk and copies both ways.

        The chunk has `max_tokens` tokens, but no more than `MEASURED_TOKENS` or than fit.
        For before the first job: it writes over blocks of the KV cache and of the swap space.
        """
        plan, generations = self._trial_chunk(max_tokens)
        num_blocks = min(MEASURED_BLOCKS, len(self._kv_cache), len(self._swap_space))
        pairs = [(block, block) for block in range(num_blocks)]
        for _ in range(2):  # what the first time compiles, allocates and maps is no part of the cost
            self._speeds.calibrate(plan.num_tokens)
            batch = build_batch(plan, generations, self._kv_cache)
            with self._speeds.computing(plan.rows):
                self.forward(batch)
            self._swapper.swap_out(pairs)
            self._swapper.swap_in(pairs)
        if self._kv_cache.device.type == "cuda":
            torch.cuda.synchronize(self._kv_cache.device)

    def _trial_chunk(self, max_tokens: int) -> tuple[StepPlan, Generations]:
        """One row of a prompt with tokens from all over the vocabulary, so that all experts take part."""
        num_blocks, *_, block_size, _ = self._kv_cache.shape
        room = min(num_blocks * block_size, context_length(self._model.config))
        count = min(max_tokens, MEASURED_TOKENS, room)
        size = vocabulary_size(self._model)
        prompt = Prompt([7919 * (index + 1) % size for index in range(count)], SamplingParams())
        sequence = SequenceId(0)
        table = tuple(BlockId(block) for block in range(-(-count // block_size)))
        plan = StepPlan(step_id=0, rows=(Row(sequence, 0, count, (table,), sample=False),))
        return plan, cast(Generations, {sequence: prompt})

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
        self._swapper.swap_out(_pairs(plan.swap_out))
        self._swapper.swap_in(_pairs(plan.swap_in))
        copy_blocks(self._kv_cache, self._kv_cache, _pairs(plan.block_copies))


def _pairs(copies: Sequence[BlockCopy]) -> list[tuple[int, int]]:
    return [(int(copy.source), int(copy.target)) for copy in copies]
