"""Static batching on a model: the same tokens as continuous batching, for more work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from batching_worker import Batching, Kind, engine_around
from static_batching import CountingRunner
from transformers import PreTrainedModel

from tests.worker.model.factories import Bench, load, make_request, make_tiny_llama
from tidemill.params import SamplingParams
from tidemill_worker.engine import Engine

PROMPTS = {"a": [5, 9, 33, 2, 71], "b": [17] * 40, "c": [64, 3], "d": [90, 91, 92], "e": list(range(2, 25))}
OUTPUTS = {"a": 12, "b": 1, "c": 5, "d": 20, "e": 3}
NEEDED = sum(len(PROMPTS[name]) + OUTPUTS[name] - 1 for name in PROMPTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return load(make_tiny_llama(folder))


def make_engine(model: PreTrainedModel, kind: Kind, *, size: int = 3) -> tuple[Engine, CountingRunner]:
    """Around a cache in which a slot read before it was written shows as NaN."""
    bench = Bench(model, max_num_batched_tokens=64, enable_prefix_caching=False)
    counter = CountingRunner(bench.runner)
    return engine_around(counter, bench.engine.scheduler.config, frozenset(), Batching(kind, size)), counter


def generate(engine: Engine) -> Mapping[str, list[int]]:
    for name, prompt in PROMPTS.items():
        params = SamplingParams(max_tokens=OUTPUTS[name], temperature=0.0, ignore_eos=True)
        engine.add(make_request(name, prompt, params))
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    return tokens


@pytest.mark.parametrize("kind", [Kind.SHRINKING, Kind.PACKED, Kind.PADDED])
def test_tokens_are_those_of_continuous_batching(model: PreTrainedModel, kind: Kind) -> None:
    expected = generate(make_engine(model, Kind.CONTINUOUS)[0])
    assert {name: len(tokens) for name, tokens in expected.items()} == OUTPUTS
    assert generate(make_engine(model, kind)[0]) == expected


@pytest.mark.parametrize("kind", [Kind.CONTINUOUS, Kind.SHRINKING])
def test_without_padding_the_model_computes_what_is_needed(model: PreTrainedModel, kind: Kind) -> None:
    engine, counter = make_engine(model, kind)
    generate(engine)
    assert counter.num_tokens == NEEDED


@pytest.mark.parametrize(
    ("kind", "prompts"), [(Kind.PACKED, (5 + 40 + 2) + (3 + 23)), (Kind.PADDED, 3 * 40 + 2 * 23)]
)
def test_padding_goes_through_the_model(model: PreTrainedModel, kind: Kind, prompts: int) -> None:
    # Given batches of (a, b, c) and of (d, e), the longest prompts 40 and 23, the longest outputs 12 and 20
    engine, counter = make_engine(model, kind)
    # When they have ended
    generate(engine)
    # Then each output has been computed to the longest, and each prompt if it is padded
    assert counter.num_tokens == prompts + 3 * (12 - 1) + 2 * (20 - 1)


@pytest.mark.parametrize("kind", [Kind.SHRINKING, Kind.PACKED, Kind.PADDED])
def test_an_answer_comes_when_its_own_sequence_ends(model: PreTrainedModel, kind: Kind) -> None:
    engine, _ = make_engine(model, kind, size=5)
    ended: list[str] = []
    for name, prompt in PROMPTS.items():
        params = SamplingParams(max_tokens=OUTPUTS[name], temperature=0.0, ignore_eos=True)
        engine.add(make_request(name, prompt, params))
    while engine.has_unfinished:
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == ["b", "e", "c", "a", "d"]
