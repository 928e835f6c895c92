"""Preempted at any token, its memory overwritten before it comes back, an answer is the same to the bit.

That is: the logits of each token, the tokens, their logprobs and those of the prompt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from tests.worker.model.factories import Bench, Rows, different, load, make_request, make_tiny_llama
from tests.worker.model.texts import paragraphs
from tidemill.params import SamplingParams
from tidemill_scheduler import BlockId, PreemptionMode
from tidemill_worker.generation import RankedToken
from tidemill_worker.request import Request

BLOCK_SIZE, NUM_BLOCKS = 8, 8
SAMPLED = SamplingParams(max_tokens=14, temperature=0.8, top_p=0.9, logprobs=3)
COMPUTED = [*range(1, 20 + SAMPLED.max_tokens - 1)]
"""Numbers of computed tokens at which a prompt of 20 can be preempted."""


@dataclass
class Answer:
    """All that one request brought."""

    rows: Rows
    token_ids: list[int]
    logprobs: list[RankedToken]
    prompt_logprobs: tuple[RankedToken, ...] | None = None


def poison(bench: Bench) -> None:
    """Make whatever holds no content NaN: blocks that are free and not cached, unused swap blocks."""
    memory = bench.engine.scheduler._memory
    for block in map(BlockId, range(memory.pool.num_blocks)):
        if memory.pool.is_free(block) and memory.pool.hash_of(block) is None:
            bench.runner._kv_cache[block] = torch.nan
    for slot in set(range(memory.swap.num_blocks)).difference(memory.swap._slots.values()):
        bench.runner._swap_space[slot] = torch.nan


def make_hungry(bench: Bench, name: str) -> Request:
    """A request that goes before others, takes all memory, and ends with its first token."""
    prompt = [2 + index % 100 for index in range(bench.num_blocks * bench.block_size)]
    return replace(make_request(name, prompt, SamplingParams(max_tokens=1)), priority=0)


def answer(bench: Bench, request: Request, *, preempted_at: tuple[int, ...] = ()) -> Answer:
    """Serve a request; a hungry one drives it out as soon as so many of its tokens have been computed."""
    bench.engine.add(request)
    (sequence,) = bench.engine.scheduler._sequences.values()
    due, found = list(preempted_at), Answer({}, [], [])
    while bench.engine.has_unfinished:
        if due and sequence.num_computed_tokens == due[0]:
            bench.engine.add(make_hungry(bench, f"hungry at {due.pop(0)}"))
        for output in bench.engine.step():
            if output.request_id == request.id:
                found.token_ids += output.token_ids
                found.logprobs += output.logprobs
                found.prompt_logprobs = output.prompt_logprobs
        bench.engine.check_integrity()
        poison(bench)
    assert sequence.num_preemptions == len(preempted_at)
    found.rows = {key: row for key, row in bench.runner.rows.items() if key[0] == request.id}
    return found


def assert_same(found: Answer, expected: Answer) -> None:
    assert different(found.rows, expected.rows) == []
    assert replace(found, rows={}) == replace(expected, rows={})


def assert_restored_by(mode: PreemptionMode, bench: Bench, computed: int) -> None:
    """Given one preemption after `computed` tokens, it went the way it was to go."""
    stats, num_full_blocks = bench.engine.stats(), computed // bench.block_size
    if mode is PreemptionMode.SWAP:
        assert stats.blocks_swapped_in == num_full_blocks
        assert stats.recomputed_tokens == computed % bench.block_size
    else:
        assert (stats.blocks_swapped_in, stats.recomputed_tokens) == (0, computed)


def make_bench(model: PreTrainedModel, mode: PreemptionMode, **changes: int) -> Bench:
    sizes: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 1,
        "num_swap_blocks": 20,
    }
    return Bench(model, preemption_mode=mode, **(sizes | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load(make_tiny_llama(tmp_path_factory.mktemp("llama")))


def make_victim(params: SamplingParams = SAMPLED) -> Request:
    dice = random.Random(0)
    return make_request("victim", [dice.randrange(2, 128) for _ in range(20)], params)


@pytest.fixture(scope="module")
def undisturbed(model: PreTrainedModel) -> Answer:
    return answer(Bench(model), make_victim())


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_at_every_token_once(model: PreTrainedModel, undisturbed: Answer, mode: PreemptionMode) -> None:
    """Within the prompt, the tokens of a step are so bounded that its first chunk ends there."""
    for computed in COMPUTED:
        bench = make_bench(model, mode, max_num_batched_tokens=computed)
        assert_same(answer(bench, make_victim(), preempted_at=(computed,)), undisturbed)
        assert_restored_by(mode, bench, computed)


@pytest.mark.parametrize("num_swap_blocks", [1, 20])
@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_at_every_token_it_generates(
    model: PreTrainedModel, undisturbed: Answer, mode: PreemptionMode, num_swap_blocks: int
) -> None:
    """One that comes back brings one token and goes again."""
    bench = make_bench(model, mode, num_swap_blocks=num_swap_blocks)
    assert_same(answer(bench, make_victim(), preempted_at=tuple(COMPUTED[19:])), undisturbed)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
@pytest.mark.parametrize("computed", [7, 8, 9, 16, 23])
def test_with_logprobs_of_the_prompt(model: PreTrainedModel, mode: PreemptionMode, computed: int) -> None:
    victim = make_victim(SAMPLED.model_copy(update={"prompt_logprobs": 2}))
    expected = answer(Bench(model), victim)
    assert expected.prompt_logprobs is not None
    assert len(expected.prompt_logprobs) == 19
    bench = make_bench(model, mode, max_num_batched_tokens=computed)
    again = make_victim(SAMPLED.model_copy(update={"prompt_logprobs": 2}))
    assert_same(answer(bench, again, preempted_at=(computed,)), expected)
    assert_restored_by(mode, bench, computed)


def test_a_swapped_block_that_were_lost_would_be_noticed(
    model: PreTrainedModel, undisturbed: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(model, PreemptionMode.SWAP)
    monkeypatch.setattr(bench.runner._swapper, "swap_in", lambda pairs: None)
    with pytest.raises(AssertionError):
        assert_same(answer(bench, make_victim(), preempted_at=(24,)), undisturbed)


@pytest.mark.timeout(300)
def test_on_smollm2(smollm2_folder: Path) -> None:
    """Within the prompt, at its end, between two tokens and on a block's end."""
    model, params = load(smollm2_folder), SamplingParams(max_tokens=9, temperature=0.0, logprobs=1)
    text = "\n\n".join(paragraphs()[:4])
    prompt = AutoTokenizer.from_pretrained(smollm2_folder)(text).input_ids[:25]
    expected = answer(Bench(model), make_request("victim", prompt, params))
    for mode, computed in [
        (PreemptionMode.SWAP, 17),
        (PreemptionMode.SWAP, 27),
        (PreemptionMode.SWAP, 32),
        (PreemptionMode.RECOMPUTE, 30),
    ]:
        bench = make_bench(
            model, mode, num_blocks=3, block_size=16, max_num_batched_tokens=min(computed, len(prompt))
        )
        found = answer(bench, make_request("victim", prompt, params), preempted_at=(computed,))
        assert_same(found, expected)
        assert_restored_by(mode, bench, computed)
