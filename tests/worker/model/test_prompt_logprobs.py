"""Prompt logprobs: right, the same however the prompt is cut, and never in need of much memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.worker.model.architectures import ARCHITECTURES, Architecture
from tests.worker.model.factories import Bench, load, make_tiny_llama
from tests.worker.model.sampling import Drawn
from tidemill.params import SamplingParams
from tidemill_scheduler import SequenceId, StepPlan
from tidemill_scheduler.plan import Row
from tidemill_scheduler.sequence import BlockId
from tidemill_worker.model import prompt_logprobs
from tidemill_worker.model.attention import AttentionCall, PagedStep
from tidemill_worker.model.batch import build_batch
from tidemill_worker.model.logprobs import rank
from tidemill_worker.model.prompt_logprobs import LOGIT_BYTES, PromptRow, body_runs_once, prompt_rows
from tidemill_worker.model.runner import ModelRunner, StepTokens
from tidemill_worker.model.survey import survey

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, logprobs=2)


def prompt_of(length: int, *, vocabulary: int = 128, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(2, vocabulary) for _ in range(length)]


def make_generation(prompt: list[int], num_prompt_logprobs: int | None = None) -> Drawn:
    return Drawn(GREEDY, prompt=prompt, num_prompt_logprobs=num_prompt_logprobs)


def make_row(sequence: int, start: int, count: int, *, sample: bool = True, num_blocks: int = 16) -> Row:
    """Each sequence has blocks of its own."""
    table = tuple(BlockId(sequence * num_blocks + block) for block in range(num_blocks))
    return Row(SequenceId(sequence), start, count, (table,), sample)


def make_runner(model: PreTrainedModel, *, num_blocks: int = 64) -> ModelRunner:
    return ModelRunner(model, Bench(model, num_blocks=num_blocks, block_size=BLOCK_SIZE).runner._kv_cache)


def run(runner: ModelRunner, generations: list[Drawn], *rows: Row) -> StepTokens:
    named = {SequenceId(index): generation for index, generation in enumerate(generations)}
    return runner.run(StepPlan(0, rows), named)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load(folder)


def test_they_are_what_transformers_says(folder: Path, model: PreTrainedModel) -> None:
    prompt = prompt_of(40)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), dim=-1)
    found = run(make_runner(model), [make_generation(prompt, 3)], make_row(0, 0, 40)).prompt_logprobs[0]
    assert [token.token_id for token in found] == prompt[1:]
    for position, token in enumerate(found):
        row = expected[position]
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=1e-3)
        assert token.rank == 1 + int((row > row[token.token_id]).sum())
        assert [logprob for _, logprob in token.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


def test_a_prompt_in_chunks_reports_the_same_bits(model: PreTrainedModel) -> None:
    generation = make_generation(prompt_of(40), 2)
    whole = run(make_runner(model), [generation], make_row(0, 0, 40)).prompt_logprobs[0]
    runner, pieces = make_runner(model), []
    for start, count in ((0, 1), (1, 15), (16, 23), (39, 1)):
        result = run(runner, [generation], make_row(0, start, count, sample=start == 39))
        pieces += result.prompt_logprobs.get(SequenceId(0), [])
        assert len(pieces) == min(start + count, 39)
    assert pieces == whole


def test_only_who_asks_is_answered_and_nobody_notices(model: PreTrainedModel) -> None:
    generations = [make_generation(prompt_of(20, seed=seed)) for seed in range(3)]
    rows = [make_row(sequence, 0, 20) for sequence in range(3)]
    undisturbed = run(make_runner(model), generations, *rows)
    assert undisturbed.prompt_logprobs == {}
    generations[1].num_prompt_logprobs = 0
    disturbed = run(make_runner(model), generations, *rows)
    assert disturbed.tokens == undisturbed.tokens
    assert disturbed.logprobs == undisturbed.logprobs
    assert list(disturbed.prompt_logprobs) == [1]
    alone = run(make_runner(model), generations[1:2], make_row(0, 0, 20))
    assert alone.prompt_logprobs[0] == disturbed.prompt_logprobs[1]


def test_only_positions_of_the_prompt_are_reported() -> None:
    # Resumed with three tokens of output, computed from position 2 on behind another sequence.
    resumed = Drawn(GREEDY, prompt=[5, 6, 7, 8], output=[9, 10, 11], num_prompt_logprobs=1)
    other = make_generation([1, 2, 3])
    plan = StepPlan(0, (make_row(0, 0, 3), make_row(1, 2, 5)))
    assert prompt_rows(plan, {SequenceId(0): other, SequenceId(1): resumed}) == [
        PromptRow(SequenceId(1), row=3, token=8, num_top=1)
    ]
    decoding = StepPlan(0, (make_row(1, 6, 1),))
    assert prompt_rows(decoding, {SequenceId(1): resumed}) == []


def test_a_prompt_of_one_token_has_nothing_to_report(model: PreTrainedModel) -> None:
    assert run(make_runner(model), [make_generation([3], 5)], make_row(0, 0, 1)).prompt_logprobs == {}


def test_a_long_prompt_over_a_large_vocabulary_stays_within_its_memory(tmp_path: Path) -> None:
    vocabulary, length = 50_000, 4000
    folder = make_tiny_llama(
        tmp_path,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model, blocks, sizes = load(folder), length // BLOCK_SIZE, []
    runner = make_runner(model, num_blocks=blocks)
    model.lm_head.register_forward_hook(lambda module, args, logits: sizes.append(logits.numel()))
    result = run(
        runner,
        [make_generation(prompt_of(length, vocabulary=vocabulary), 1)],
        make_row(0, 0, length, num_blocks=blocks),
    )
    assert len(result.prompt_logprobs[0]) == length - 1
    assert max(sizes) * 4 <= LOGIT_BYTES < length * vocabulary * 4
    assert sum(sizes) == length * vocabulary  # and no row was computed twice


DECODER_IS_THE_HEAD = Architecture("decoder is the head", "modernbert-decoder", tied=True)
"""What `get_decoder` finds in it is the product with the vocabulary."""


@pytest.mark.parametrize("architecture", [*ARCHITECTURES.values(), DECODER_IS_THE_HEAD], ids=lambda a: a.name)
def test_the_body_runs_once_and_every_row_keeps_its_bits(
    architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the logits of all rows from one ordinary call,
    model = load(architecture.make(tmp_path))
    runner, generation = make_runner(model), make_generation(prompt_of(24, seed=3))
    plan, named = StepPlan(0, (make_row(0, 0, 24),)), {SequenceId(0): generation}
    with torch.inference_mode():
        logits = runner._logits(build_batch(plan, named, runner._kv_cache), torch.arange(24))
    undisturbed = runner.run(plan, named)

    # when a step looks at them five at a time,
    monkeypatch.setattr(prompt_logprobs, "LOGIT_BYTES", 5 * 4 * logits.shape[1])
    calls = count_attention(monkeypatch)
    generation.num_prompt_logprobs = 4
    step = runner.run(plan, named)

    # then they are the same, and the body has run once.
    expected = rank(logits, range(23), generation.prompt[1:], [4] * 23)
    assert step.prompt_logprobs[SequenceId(0)] == list(expected)
    assert (step.tokens, step.logprobs) == (undisturbed.tokens, undisturbed.logprobs)
    assert len(calls) == len(survey(model))


def count_attention(monkeypatch: pytest.MonkeyPatch) -> list[AttentionCall]:
    """A list that grows with each call of attention."""
    calls: list[AttentionCall] = []
    answer = PagedStep.__call__

    def counted(self: PagedStep, call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return answer(self, call)

    monkeypatch.setattr(PagedStep, "__call__", counted)
    return calls


def test_the_model_is_itself_again_afterwards(model: PreTrainedModel) -> None:
    forward = model.get_decoder().forward
    with pytest.raises(RuntimeError, match="broken"), body_runs_once(model):
        raise RuntimeError("broken")
    assert model.get_decoder().forward == forward
