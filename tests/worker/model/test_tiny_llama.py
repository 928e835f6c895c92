"""On tiny random Llamas: the same bits whatever happens, and transformers' own numbers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.worker.model.agreement import assert_agrees
from tests.worker.model.factories import (
    Bench,
    different,
    generate_alone,
    load,
    make_tiny_llama,
    preempt_at_random,
)
from tests.worker.model.mutations import MUTATIONS
from tidemill.params import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, top_k=40)

VARIANTS: dict[str, dict[str, object]] = {
    "grouped heads": {},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 6},
    "untied, with biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
}


def make_prompts() -> dict[str, list[int]]:
    dice = random.Random(0)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 150]
    return {f"p{n}": [dice.randrange(2, 128) for _ in range(n)] for n in lengths}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load(folder)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [16, 37, 64, 512])
@pytest.mark.parametrize("block_size", [8, 16])
def test_logits_are_the_same_bits_in_a_crowd(
    model: PreTrainedModel, params: SamplingParams, budget: int, block_size: int
) -> None:
    prompts = make_prompts()
    bench = Bench(model, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=11)
    bench.generate(prompts, params)
    assert different(bench.runner.rows, generate_alone(model, prompts, params)) == []


def test_logits_are_the_same_bits_after_prefix_hits(model: PreTrainedModel) -> None:
    prompts = make_prompts()
    bench = Bench(model)
    bench.generate(prompts, SAMPLED)
    first = dict(bench.runner.rows)
    bench.generate(prompts, SAMPLED)
    assert bench.engine.stats().prefix_hit_tokens > 300
    assert different(bench.runner.rows, first) == []


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_logits_are_the_same_bits_after_preemptions(model: PreTrainedModel, seed: int, caching: bool) -> None:
    prompts = make_prompts()
    bench = Bench(model, max_num_batched_tokens=64, enable_prefix_caching=caching)
    bench.generate(prompts, SAMPLED, between_steps=preempt_at_random(seed, 0.2))
    assert bench.engine.stats().num_preemptions > 10
    assert different(bench.runner.rows, generate_alone(model, prompts, SAMPLED)) == []


def test_starved_equals_endless(model: PreTrainedModel) -> None:
    prompts = make_prompts()
    starved = Bench(model, num_blocks=13, max_num_batched_tokens=64)
    starved.generate(prompts, SAMPLED)
    assert starved.engine.stats().num_preemptions > 0
    assert different(starved.runner.rows, generate_alone(model, prompts, SAMPLED)) == []


def test_a_resumed_generation_goes_on_with_the_same_bits(model: PreTrainedModel) -> None:
    from tests.worker.model.factories import make_request

    prompts = {"p33": make_prompts()["p33"]}
    undisturbed = Bench(model)
    tokens = undisturbed.generate(prompts, SAMPLED)["p33"]
    for known in (1, 5, 11):
        resumed = Bench(model)
        request = make_request("p33", prompts["p33"], SAMPLED)
        request.choices[0].output_token_ids = tokens[:known]
        resumed.engine.add(request)
        rest: list[int] = []
        while resumed.engine.has_unfinished:
            rest += [token for output in resumed.engine.step() for token in output.token_ids]
        assert rest == tokens[known:]
        expected = {key: row for key, row in undisturbed.runner.rows.items() if key[1] >= known}
        assert different(resumed.runner.rows, expected) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_with_transformers(tmp_path: Path, variant: str) -> None:
    prompts = make_prompts()
    folder = make_tiny_llama(tmp_path, **VARIANTS[variant])
    bench = Bench(load(folder), max_num_batched_tokens=64)
    tokens = bench.generate(prompts, GREEDY)
    assert_agrees(folder, prompts, tokens, bench.runner.rows)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_noticed(
    folder: Path, model: PreTrainedModel, mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts()
    bench = Bench(model, max_num_batched_tokens=64)
    MUTATIONS[mutation](monkeypatch)
    bench.runner._kv_cache.zero_()  # so that it is the numbers that tell, not a NaN
    tokens = bench.generate(prompts, GREEDY)
    with pytest.raises(AssertionError, match=r"standard deviation|below the maximum"):
        assert_agrees(folder, prompts, tokens, bench.runner.rows)
