"""Tiny random models, and an engine around a model that remembers every row of logits."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tidemill.params import SamplingParams
from tidemill_scheduler import PreemptionMode, Scheduler, SchedulerConfig, SequenceId, StepPlan
from tidemill_worker.engine import Engine, StepOutput
from tidemill_worker.model.architecture import context_length
from tidemill_worker.model.batch import Generations, PagedBatch
from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.model.loader import load_model
from tidemill_worker.model.runner import ModelRunner
from tidemill_worker.model.survey import survey
from tidemill_worker.request import OpenChoice, Request

CPU = torch.device("cpu")
Rows = dict[tuple[str, int], torch.Tensor]
"""Logits by (request id, index in the generation)."""


def make_tiny_llama(folder: Path, *, seed: int = 0, **overrides: object) -> Path:
    """Write a random Llama of some 100,000 weights, lively enough for attention to matter."""
    settings: dict[str, object] = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 1,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(settings | overrides))).save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    return load_model(folder, device=CPU, dtype=torch.float32).model


class NoText:
    """Stands for the tokenizer's side where a test looks at tokens only."""

    def append(self, token_id: int) -> str | None:
        return None

    def take(self) -> str:
        return ""

    def close(self) -> str:
        return ""


class RecordingRunner(ModelRunner):
    """A runner that keeps the logits of every row it samples."""

    def __init__(self, model: PreTrainedModel, kv_cache: torch.Tensor, swap_space: torch.Tensor) -> None:
        super().__init__(model, kv_cache, swap_space)
        self.rows: Rows = {}
        self._generations: Generations = {}

    def run(self, plan: StepPlan, generations: Generations) -> Mapping[SequenceId, int]:
        self._generations = generations
        return super().run(plan, generations)

    def forward(self, batch: PagedBatch) -> torch.Tensor:
        logits = super().forward(batch)
        for sequence, row in zip(batch.sampled, logits, strict=True):
            generation = self._generations[sequence]
            index = len(generation.token_ids) - generation.num_prompt_tokens
            self.rows[generation.owner.request.id, index] = row.clone()  # type: ignore[attr-defined]  # the engine's own
        return logits


@dataclass
class Bench:
    """An engine over a poisoned cache: a slot that is read before it was written shows as NaN."""

    model: PreTrainedModel
    num_blocks: int = 256
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    num_swap_blocks: int = 0
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    runner: RecordingRunner = field(init=False)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        spec = KVCacheSpec.for_layers(survey(self.model), block_size=self.block_size, dtype=torch.float32)
        self.runner = RecordingRunner(
            self.model,
            spec.allocate(self.num_blocks, CPU).fill_(torch.nan),
            spec.allocate_swap_space(self.num_swap_blocks, CPU).fill_(torch.nan),
        )
        config = SchedulerConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=context_length(self.model.config),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            num_swap_blocks=self.num_swap_blocks,
            preemption_mode=self.preemption_mode,
        )
        self.engine = Engine(self.runner, Scheduler(config), frozenset())

    def generate(
        self,
        prompts: Mapping[str, Sequence[int]],
        params: SamplingParams,
        *,
        between_steps: Callable[[Scheduler], None] = lambda scheduler: None,
    ) -> dict[str, list[int]]:
        """Run all prompts to their end; return their tokens. The logits are in `runner.rows`."""
        for name, prompt in prompts.items():
            self.engine.add(make_request(name, prompt, params))
        outputs: list[StepOutput] = []
        while self.engine.has_unfinished:
            outputs += self.engine.step()
            self.engine.scheduler.check_integrity()
            between_steps(self.engine.scheduler)
        tokens: dict[str, list[int]] = {name: [] for name in prompts}
        for output in outputs:
            assert output.error is None
            tokens[output.request_id] += output.token_ids
        return tokens


def make_request(name: str, prompt: Sequence[int], params: SamplingParams) -> Request:
    """A request whose seed follows from its name."""
    seed = zlib.crc32(name.encode())
    choices = [OpenChoice(index, NoText()) for index in range(params.n)]
    return Request(id=name, prompt_token_ids=prompt, params=params, seed=seed, choices=choices)


def generate_alone(
    model: PreTrainedModel, prompts: Mapping[str, Sequence[int]], params: SamplingParams
) -> Rows:
    """The logits of each prompt with the engine to itself, nothing cached, nothing chunked."""
    rows: Rows = {}
    for name, prompt in prompts.items():
        bench = Bench(model)
        bench.generate({name: prompt}, params)
        rows |= bench.runner.rows
    return rows


def preempt_at_random(seed: int, probability: float) -> Callable[[Scheduler], None]:
    """Between any two steps, throw any running sequence out with this probability."""
    dice = random.Random(seed)

    def preempt(scheduler: Scheduler) -> None:
        for sequence in list(scheduler._running):
            if dice.random() < probability:
                scheduler.preempt(sequence.id)

    return preempt


def different(left: Rows, right: Rows) -> list[tuple[str, int]]:
    """The rows that are not the same bits; both sides must have the same rows."""
    assert left.keys() == right.keys()
    return [key for key in left if not torch.equal(left[key], right[key])]
