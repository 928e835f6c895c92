"""Every architecture of the table: the same bits whatever happens, and transformers' own numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.worker.model.agreement import assert_agrees
from tests.worker.model.architectures import ARCHITECTURES, Architecture
from tests.worker.model.factories import Bench, Rows, different, generate_alone, load, preempt_at_random
from tests.worker.model.mutations import (
    MUTATIONS,
    SINKS_DROPPED,
    SOFTCAP_OFF,
    SPECIAL_MUTATIONS,
    WINDOW_OFF_BY_ONE,
    Mutation,
)
from tidemill.params import SamplingParams
from tidemill_worker.model.loader import load_config, weight_bytes
from tidemill_worker.model.outline import outline
from tidemill_worker.model.survey import survey

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
BRIEF = SamplingParams(max_tokens=3, temperature=0.0)
LENGTHS = (1, 9, 16, 33, 47)


def make_prompts(*lengths: int) -> dict[str, list[int]]:
    dice = random.Random(0)
    return {f"p{n}": [dice.randrange(2, 128) for _ in range(n)] for n in lengths}


@dataclass
class Trial:
    """One architecture, loaded once for all that is done with it."""

    architecture: Architecture
    folder: Path
    model: PreTrainedModel

    @cached_property
    def alone(self) -> Rows:
        return generate_alone(self.model, make_prompts(*LENGTHS), GREEDY)

    def bench(self, **limits: int) -> Bench:
        return Bench(self.model, num_blocks=64, block_size=8, **limits)

    def mutations(self) -> dict[str, Mutation]:
        """Those that this architecture must not survive."""
        concerned = {
            SOFTCAP_OFF: self.architecture.softcap is not None,
            WINDOW_OFF_BY_ONE: self.architecture.window is not None,
            SINKS_DROPPED: self.architecture.sinks,
        }
        return MUTATIONS | {name: SPECIAL_MUTATIONS[name] for name, has in concerned.items() if has}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    architecture = ARCHITECTURES[request.param]
    folder = architecture.make(tmp_path_factory.mktemp("model"))
    yield Trial(architecture, folder, load(folder))


def test_a_crowd_with_chunks_and_preemptions_has_the_same_bits(trial: Trial) -> None:
    """Mixed batches of chunks and single tokens, then all of it once more out of the prefix cache."""
    prompts = make_prompts(*LENGTHS)
    bench = trial.bench(max_num_batched_tokens=20, max_num_seqs=5)
    bench.generate(prompts, GREEDY, between_steps=preempt_at_random(1, 0.3))
    assert bench.engine.stats().num_preemptions > 2
    assert different(bench.runner.rows, trial.alone) == []

    bench.generate(prompts, GREEDY)
    assert bench.engine.stats().prefix_hit_tokens > 40
    assert different(bench.runner.rows, trial.alone) == []


def test_logits_agree_with_transformers(trial: Trial) -> None:
    prompts = make_prompts(*LENGTHS)
    bench = trial.bench(max_num_batched_tokens=64)
    tokens = bench.generate(prompts, GREEDY)
    assert_agrees(trial.folder, prompts, tokens, bench.runner.rows)


def test_every_mutation_that_concerns_it_is_noticed(trial: Trial) -> None:
    prompts = make_prompts(20, 33)
    for name, mutate in trial.mutations().items():
        bench = trial.bench()
        bench.runner._kv_cache.zero_()  # so that it is the numbers that tell, not a NaN
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            tokens = bench.generate(prompts, BRIEF)
        with pytest.raises(AssertionError, match=r"standard deviation|below the maximum"):
            assert_agrees(trial.folder, prompts, tokens, bench.runner.rows)
            pytest.fail(f"survived: {name}", pytrace=False)


def test_the_table_says_what_the_models_have(trial: Trial) -> None:
    """What decides over the mutations, against what the attention is really asked for."""
    layers = survey(trial.model)
    assert {layer.window for layer in layers} - {None} == {trial.architecture.window} - {None}
    assert {layer.softcap for layer in layers} == {trial.architecture.softcap}
    assert any(layer.has_sinks for layer in layers) == trial.architecture.sinks
    tied = trial.model.config.get_text_config().tie_word_embeddings
    assert tied == trial.architecture.tied


def test_its_configuration_alone_tells_its_layers_and_weights(trial: Trial) -> None:
    known = outline(load_config(trial.folder), dtype=torch.float32)
    assert known.layers == survey(trial.model)
    plain = AutoModelForCausalLM.from_pretrained(trial.folder, dtype=torch.float32)
    assert known.num_parameters == plain.num_parameters()
    assert known.weight_bytes == weight_bytes(plain)
