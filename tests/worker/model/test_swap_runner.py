"""The runner carries out swaps: every block arrives as it left, and before anything depends on it."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import cast

import pytest
import torch
from transformers import PreTrainedModel

from tests.worker.model.factories import CPU, load, make_tiny_llama
from tidemill.params import SamplingParams
from tidemill_scheduler.costs import RestoreCosts
from tidemill_scheduler.plan import BlockCopy, Row, StepPlan
from tidemill_scheduler.sequence import BlockId, SequenceId
from tidemill_worker.model import runner as runner_module
from tidemill_worker.model.batch import Generations, build_batch
from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.model.lap import HostLap
from tidemill_worker.model.probe import Prompt
from tidemill_worker.model.runner import ModelRunner
from tidemill_worker.model.survey import survey

NUM_BLOCKS, NUM_SWAP_BLOCKS, BLOCK_SIZE, PROMPT_TOKENS = 8, 6, 16, 64
SEQUENCE = SequenceId(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load(make_tiny_llama(tmp_path_factory.mktemp("llama")))


class UnreportedPrompt(Prompt):
    """A prompt whose job asks for no logprobs of it."""

    num_prompt_logprobs = None


class Bench:
    """A runner without a scheduler, over a cache and a swap space that are poisoned where not written."""

    def __init__(self, model: PreTrainedModel) -> None:
        spec = KVCacheSpec.for_layers(survey(model), block_size=BLOCK_SIZE, dtype=torch.float32)
        self.kv_cache = spec.allocate(NUM_BLOCKS, CPU).fill_(torch.nan)
        self.swap_space = spec.allocate_swap_space(NUM_SWAP_BLOCKS, CPU).fill_(torch.nan)
        self.runner = ModelRunner(model, self.kv_cache, self.swap_space)
        dice = random.Random(0)
        token_ids = [dice.randrange(2, 128) for _ in range(PROMPT_TOKENS)]
        self.generations = cast(Generations, {SEQUENCE: UnreportedPrompt(token_ids, SamplingParams())})

    def prefill(self, start: int, length: int, table: list[int]) -> torch.Tensor:
        """Compute these tokens of the prompt; return the logits of the last."""
        batch = build_batch(StepPlan(0, (row(start, length, table),)), self.generations, self.kv_cache)
        with torch.inference_mode():
            return self.runner.forward(batch)

    def execute(self, **copies: tuple[BlockCopy, ...]) -> None:
        self.runner.run(StepPlan(0, **copies), self.generations)


def row(start: int, length: int, table: list[int]) -> Row:
    return Row(SEQUENCE, start, length, (tuple(map(BlockId, table)),), sample=True)


def copies(pairs: dict[int, int]) -> tuple[BlockCopy, ...]:
    """From each key to its value."""
    return tuple(BlockCopy(BlockId(source), BlockId(target)) for source, target in pairs.items())


def checksums(blocks: torch.Tensor) -> list[str]:
    return [blake2b(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for block in blocks]


def test_blocks_come_back_as_they_left(model: PreTrainedModel) -> None:
    bench = Bench(model)
    bench.prefill(0, 63, [5, 2, 3, 7])
    before = checksums(bench.kv_cache[[5, 2, 3]])
    bench.execute(swap_out=copies({5: 1, 2: 4, 3: 5}))
    bench.kv_cache.fill_(torch.nan)
    bench.execute(swap_in=copies({1: 0, 4: 6, 5: 7}))
    assert checksums(bench.kv_cache[[0, 6, 7]]) == before
    assert len(set(before)) == 3
    assert bench.kv_cache[1:6].isnan().all()
    assert bench.swap_space[[0, 2, 3]].isnan().all()


def test_a_prompt_goes_on_over_swapped_blocks_with_the_same_bits(model: PreTrainedModel) -> None:
    undisturbed = Bench(model).prefill(0, PROMPT_TOKENS, [0, 1, 2, 3])
    bench = Bench(model)
    bench.prefill(0, 48, [4, 5, 6])
    bench.execute(swap_out=copies({4: 2, 5: 0, 6: 1}))
    bench.kv_cache.fill_(torch.nan)
    bench.execute(swap_in=copies({2: 7, 0: 1, 1: 3}))
    assert torch.equal(bench.prefill(48, 16, [7, 1, 3, 0]), undisturbed)


def test_a_plan_swaps_out_then_in_then_copies_blocks_then_computes(model: PreTrainedModel) -> None:
    """Given one plan that uses blocks as the work before leaves them, then that was the order."""
    undisturbed, bench = Bench(model), Bench(model)
    undisturbed.prefill(0, PROMPT_TOKENS, [0, 1, 2, 3])
    bench.prefill(0, 48, [0, 1, 2])
    plan = StepPlan(
        0,
        swap_out=copies({0: 3, 1: 4, 2: 5}),
        swap_in=copies({3: 2, 4: 0, 5: 6}),  # from where they have just gone, to where they were
        block_copies=copies({2: 4, 0: 5}),  # from where they have just come in
        rows=(replace(row(48, 16, [4, 5, 6, 2]), sample=False),),  # over one that was copied
    )
    bench.runner.run(plan, bench.generations)
    assert checksums(bench.kv_cache[[4, 5, 6, 2]]) == checksums(undisturbed.kv_cache[:4])
    assert checksums(bench.swap_space[3:]) == checksums(undisturbed.kv_cache[:3])


def test_a_plan_without_rows_makes_its_copies_and_no_tokens(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(model)
    bench.kv_cache[3] = 1.0
    monkeypatch.delattr(ModelRunner, "forward")
    tokens = bench.runner.run(StepPlan(0, swap_out=copies({3: 2})), {})
    assert (tokens.tokens, tokens.logprobs, tokens.prompt_logprobs) == ({}, {}, {})
    assert (bench.swap_space[2] == 1.0).all()


@pytest.mark.parametrize(
    "plan",
    [StepPlan(0, swap_out=copies({3: NUM_SWAP_BLOCKS})), StepPlan(0, swap_in=copies({NUM_SWAP_BLOCKS: 3}))],
    ids=["out", "in"],
)
def test_a_block_that_does_not_exist_is_an_error(model: PreTrainedModel, plan: StepPlan) -> None:
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        Bench(model).runner.run(plan, {})


def test_without_swap_space_a_swap_is_an_error(model: PreTrainedModel) -> None:
    runner = ModelRunner(model, Bench(model).kv_cache)
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        runner.run(StepPlan(0, swap_out=copies({0: 0})), {})


def test_swap_space_has_the_shape_of_the_cache_and_may_be_none(model: PreTrainedModel) -> None:
    spec = KVCacheSpec.for_layers(survey(model), block_size=BLOCK_SIZE, dtype=torch.bfloat16)
    for num_blocks in (0, 3):
        swap_space = spec.allocate_swap_space(num_blocks, CPU)
        assert swap_space.shape == spec.allocate(num_blocks, CPU).shape
        assert (swap_space.dtype, swap_space.device) == (torch.bfloat16, CPU)
        assert swap_space.nbytes == num_blocks * spec.bytes_per_block


class Pages:
    """Stands for CUDA's runtime: which memory it has locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # CUDA's name
        self.locked[address] = size
        return flags

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


def test_for_a_gpu_swap_space_is_locked_as_long_as_it_lives(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, errors = Pages(), list[int]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pages)
    monkeypatch.setattr(torch.cuda, "check_error", errors.append)
    spec = KVCacheSpec.for_layers(survey(model), block_size=BLOCK_SIZE, dtype=torch.float32)
    swap_space = spec.allocate_swap_space(3, torch.device("cuda"))
    assert swap_space.device == CPU
    assert pages.locked == {swap_space.data_ptr(): 3 * spec.bytes_per_block}
    assert errors == [0]
    del swap_space
    gc.collect()
    assert pages.locked == {}
    spec.allocate_swap_space(0, torch.device("cuda"))
    assert errors == [0]  # there is nothing to lock


@pytest.fixture
def slow_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this clock, each prefill chunk and each copy takes a second."""
    monkeypatch.setattr(runner_module, "laps_of", lambda device: lambda: HostLap(partial(next, count(0.0))))


@pytest.mark.usefixtures("slow_laps")
def test_costs_are_measured_with_a_chunk_that_fits_and_a_copy_each_way(model: PreTrainedModel) -> None:
    bench = Bench(model)
    bench.runner.measure_costs(48)
    assert bench.runner.costs == RestoreCosts(1 / 48, pytest.approx(1 / NUM_SWAP_BLOCKS))
    bench.runner.measure_costs(1_000_000)
    assert bench.runner.costs.seconds_per_token == 1 / (NUM_BLOCKS * BLOCK_SIZE)


@pytest.mark.usefixtures("slow_laps")
def test_no_more_is_computed_for_the_costs_than_tells_them(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without chunked prefill, a step may be as long as the longest prompt."""
    monkeypatch.setattr(runner_module, "MEASURED_TOKENS", 32)
    bench = Bench(model)
    bench.runner.measure_costs(NUM_BLOCKS * BLOCK_SIZE)
    assert bench.runner.costs.seconds_per_token == 1 / 32


@pytest.mark.usefixtures("slow_laps")
def test_costs_are_corrected_by_the_plans_that_are_executed(model: PreTrainedModel) -> None:
    bench = Bench(model)
    bench.runner.measure_costs(NUM_BLOCKS * BLOCK_SIZE)
    decode, prefill = row(3, 1, [0]), row(0, PROMPT_TOKENS, [0, 1, 2, 3])
    before = bench.runner.costs
    bench.runner.run(StepPlan(0, (replace(decode, sample=False),)), bench.generations)
    bench.runner.run(StepPlan(1, swap_out=copies({0: 0})), bench.generations)
    assert bench.runner.costs == before
    bench.runner.run(StepPlan(2, (replace(prefill, sample=False),)), bench.generations)
    bench.runner.run(StepPlan(3, swap_in=copies({0: 0, 1: 1, 2: 2, 3: 3})), bench.generations)
    assert before.seconds_per_token < bench.runner.costs.seconds_per_token < 1 / PROMPT_TOKENS
    assert before.seconds_per_block < bench.runner.costs.seconds_per_block < 1 / 4


def test_costs_are_seconds_of_this_machine(model: PreTrainedModel) -> None:
    bench = Bench(model)
    started = time.perf_counter()
    bench.runner.measure_costs(64)
    elapsed = time.perf_counter() - started
    costs = bench.runner.costs
    assert 0 < 64 * costs.seconds_per_token + 2 * NUM_SWAP_BLOCKS * costs.seconds_per_block < elapsed
