"""A prompt of 32,000 tokens among jobs that decode: it gets through, and they keep producing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.worker.model.factories import Bench, load, make_request, make_tiny_llama
from tidemill.params import SamplingParams

NUM_LONG, NUM_DECODING = 32_000, 16
CONTEXT = NUM_LONG + 64
STEPS_BEFORE = 4

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(
        tmp_path_factory.mktemp("long"),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
    )


def test_a_long_prompt_goes_through_beside_jobs_that_decode(folder: Path) -> None:
    """Every one of them gets a token in every step, as if the long one were not there."""
    model = load(folder)
    bench = Bench(model, num_blocks=CONTEXT // 16 + 400, max_num_batched_tokens=1024)
    dice = random.Random(0)
    long_prompt = [dice.randrange(2, 128) for _ in range(NUM_LONG)]
    engine = bench.engine
    for number in range(NUM_DECODING):
        params = SamplingParams(max_tokens=200, temperature=0.8)
        engine.add(make_request(f"short-{number}", [number + 2, 7, 9], params))
    for _ in range(STEPS_BEFORE):
        engine.step()
    engine.add(make_request("long", long_prompt, SamplingParams(max_tokens=4, temperature=0.0)))

    steps, tokens = 0, []
    while not tokens:
        outputs = engine.step()
        steps += 1
        assert {output.request_id for output in outputs} >= {f"short-{n}" for n in range(NUM_DECODING)}
        tokens = [output for output in outputs if output.request_id == "long"]
    assert steps >= NUM_LONG // 1024
    while engine.has_unfinished:
        engine.step()

    alone = Bench(model, num_blocks=CONTEXT // 16 + 1, max_num_batched_tokens=1024)
    alone.generate({"long": long_prompt}, SamplingParams(max_tokens=4, temperature=0.0))
    for index in range(4):
        assert bench.runner.rows["long", index].equal(alone.runner.rows["long", index])
