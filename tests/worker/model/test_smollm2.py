"""On the real SmolLM2: the promise of the same bits, and agreement with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedModel

from tests.worker.model.agreement import assert_agrees
from tests.worker.model.factories import Bench, Rows, different, load, preempt_at_random
from tests.worker.model.mutations import MUTATIONS
from tests.worker.model.texts import paragraphs
from tidemill.params import SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
# SmolLM2's logits have a standard deviation of 3 to 4; an absolute 1e-3 is the bound.
TOLERANCE = 2.5e-4
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(smollm2_folder: Path) -> PreTrainedModel:
    return load(smollm2_folder)


@pytest.fixture(scope="module")
def prompts(smollm2_folder: Path) -> dict[str, list[int]]:
    """32 prompts of 30 to some 300 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    text = paragraphs()
    return {
        f"p{index}": tokenizer("\n\n".join(text[10 * index : 10 * index + 8])).input_ids[: 30 + 8 * index]
        for index in range(32)
    }


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel, prompts: dict[str, list[int]]) -> Rows:
    """Each prompt with the engine to itself and nothing in the cache."""
    bench = Bench(model, num_blocks=1500, enable_prefix_caching=False)
    for name, prompt in prompts.items():
        bench.generate({name: prompt}, GREEDY)
    return bench.runner.rows


@pytest.mark.parametrize("budget", [37, 512])
def test_a_crowd_of_32_has_the_same_bits(
    model: PreTrainedModel, prompts: dict[str, list[int]], alone: Rows, budget: int
) -> None:
    bench = Bench(model, num_blocks=1500, max_num_seqs=32, max_num_batched_tokens=budget)
    bench.generate(prompts, GREEDY)
    assert different(bench.runner.rows, alone) == []

    # Once more, with every prompt in the prefix cache.
    bench.generate(prompts, GREEDY)
    assert bench.engine.stats().prefix_hit_tokens > 0.8 * sum(map(len, prompts.values()))
    assert different(bench.runner.rows, alone) == []


def test_preemptions_leave_no_trace(
    model: PreTrainedModel, prompts: dict[str, list[int]], alone: Rows
) -> None:
    bench = Bench(model, num_blocks=320, max_num_seqs=32)
    bench.generate(prompts, GREEDY, between_steps=preempt_at_random(0, 0.3))
    assert bench.engine.stats().num_preemptions > 20
    assert different(bench.runner.rows, alone) == []


def test_a_preemption_at_any_step_leaves_no_trace(
    model: PreTrainedModel, prompts: dict[str, list[int]], alone: Rows
) -> None:
    name = "p1"
    for step in range(1, GREEDY.max_tokens + 1):
        bench = Bench(model, enable_prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=37)
        bench.generate({name: prompts[name]}, GREEDY, between_steps=_Preempt(at=step))
        assert bench.engine.stats().num_preemptions == 1
        assert different(bench.runner.rows, {key: row for key, row in alone.items() if key[0] == name}) == []


class _Preempt:
    def __init__(self, at: int) -> None:
        self.countdown = at

    def __call__(self, scheduler: object) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            preempt_at_random(0, 1.0)(scheduler)  # type: ignore[arg-type]


def test_logits_agree_with_transformers(
    smollm2_folder: Path, model: PreTrainedModel, prompts: dict[str, list[int]]
) -> None:
    bench = Bench(model, num_blocks=1500)
    tokens = bench.generate(prompts, GREEDY)
    assert_agrees(smollm2_folder, prompts, tokens, bench.runner.rows, relative=TOLERANCE)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_noticed(
    smollm2_folder: Path,
    model: PreTrainedModel,
    prompts: dict[str, list[int]],
    mutation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = {name: prompts[name] for name in ("p0", "p1")}
    bench = Bench(model)
    MUTATIONS[mutation](monkeypatch)
    bench.runner._kv_cache.zero_()  # so that it is the numbers that tell, not a NaN
    tokens = bench.generate(few, GREEDY)
    with pytest.raises(AssertionError, match=r"standard deviation|below the maximum"):
        assert_agrees(smollm2_folder, few, tokens, bench.runner.rows, relative=TOLERANCE)
