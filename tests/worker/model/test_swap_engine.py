"""Sequences that are swapped out and in again under memory starvation go on with the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedModel

from tests.worker.model.factories import (
    Bench,
    Rows,
    different,
    generate_alone,
    load,
    make_tiny_llama,
    preempt_at_random,
)
from tests.worker.model.texts import paragraphs
from tidemill.params import SamplingParams
from tidemill_scheduler import PreemptionMode, RestoreCosts

SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, top_k=40)
GREEDY = SamplingParams(max_tokens=30, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load(make_tiny_llama(tmp_path_factory.mktemp("llama")))


def make_prompts() -> dict[str, list[int]]:
    dice = random.Random(0)
    lengths = [1, 15, 16, 17, 31, 33, 48, 64, 80, 100, 150]
    return {f"p{n}": [dice.randrange(2, 128) for _ in range(n)] for n in lengths}


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> Rows:
    """Each prompt with the engine and endless memory to itself."""
    return generate_alone(model, make_prompts(), SAMPLED)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_swap_blocks", [5, 100], ids=["little swap space", "much swap space"])
def test_starved_with_swap_space_equals_endless(
    model: PreTrainedModel, alone: Rows, num_swap_blocks: int, caching: bool
) -> None:
    starved = Bench(
        model,
        num_blocks=16,
        max_num_batched_tokens=64,
        enable_prefix_caching=caching,
        num_swap_blocks=num_swap_blocks,
        preemption_mode=PreemptionMode.SWAP,
    )
    starved.generate(make_prompts(), SAMPLED)
    stats = starved.engine.stats()
    assert stats.num_swap_preemptions > 0
    assert min(stats.blocks_swapped_out, stats.blocks_swapped_in) > 0
    assert different(starved.runner.rows, alone) == []


@pytest.mark.parametrize("seed", range(3))
def test_preemptions_at_any_step_leave_no_trace(model: PreTrainedModel, alone: Rows, seed: int) -> None:
    bench = Bench(
        model,
        num_blocks=24,
        max_num_batched_tokens=64,
        num_swap_blocks=40,
        preemption_mode=PreemptionMode.SWAP,
    )
    bench.generate(make_prompts(), SAMPLED, between_steps=preempt_at_random(seed, 0.1))
    assert bench.engine.stats().blocks_swapped_in > 10
    assert different(bench.runner.rows, alone) == []


def test_choosing_by_measured_costs_leaves_no_trace(model: PreTrainedModel, alone: Rows) -> None:
    bench = Bench(model, num_blocks=16, max_num_batched_tokens=64, num_swap_blocks=100)
    bench.runner.measure_costs(64)
    bench.generate(make_prompts(), SAMPLED)
    assert bench.engine.stats().num_preemptions > 0
    assert bench.engine.scheduler.costs == bench.runner.costs != RestoreCosts()
    assert different(bench.runner.rows, alone) == []


@pytest.mark.timeout(300)
def test_smollm2_starved_with_swap_space_equals_endless(smollm2_folder: Path) -> None:
    model, text = load(smollm2_folder), paragraphs()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    prompts = {
        f"p{index}": tokenizer("\n\n".join(text[10 * index : 10 * index + 8])).input_ids[: 47 + index]
        for index in range(6)
    }
    endless = Bench(model, num_blocks=100)
    endless.generate(prompts, GREEDY)
    starved = Bench(model, num_blocks=13, num_swap_blocks=40, preemption_mode=PreemptionMode.SWAP)
    starved.generate(prompts, GREEDY)
    assert starved.engine.stats().blocks_swapped_in > 0
    assert different(starved.runner.rows, endless.runner.rows) == []
