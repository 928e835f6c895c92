"""Any parameters beside any others: each row gets what it gets alone, and what the definition says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.model.sampling import Drawn, reference_token, sample_full
from tidemill.params import SamplingParams
from tidemill_kernels.rank_tokens import LOWEST
from tidemill_worker.model.sampler import INVALID_TOKEN, Sampler

VOCABULARY = 150

tokens = st.integers(0, VOCABULARY + 3)
dyadic = st.integers(-8, 8).map(lambda eighths: eighths / 4)
"""Penalties that a float32 holds exactly, so that equal logits stay equal by any arithmetic."""

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.25, 0.7, 1.0, 1.3, 4.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 7, 60, 149, 150, 500]),
    top_p=st.sampled_from([1.0, 0.03, 0.37, 0.83, 0.991]),
    min_p=st.sampled_from([0.0, 0.0, 0.013, 0.27, 1.0]),
    min_tokens=st.integers(0, 6),
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0, 8.0]),
    presence_penalty=dyadic,
    frequency_penalty=dyadic,
    logit_bias=st.dictionaries(tokens, st.integers(-40, 40).map(lambda halves: halves / 2), max_size=4),
    logprobs=st.sampled_from([None, 0, 3, 20]),
    seed=st.none(),
)

generations = st.builds(
    Drawn,
    params=params,
    prompt=st.lists(tokens, min_size=1, max_size=6),
    output=st.lists(st.integers(0, 5), max_size=8),
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 63),
    end_tokens=st.sets(tokens, max_size=3),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=4),
    allowed=st.none() | st.sets(tokens, max_size=100),
    mask_words=st.integers(1, 6),
)


@st.composite
def logits(draw: st.DrawFn) -> torch.Tensor:
    """A row as models give them: flat or peaked, with or without ties, now and then unusable."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = generator.standard_normal(VOCABULARY) * draw(st.sampled_from([0.0, 0.3, 2.0, 9.0]))
    row += draw(st.sampled_from([-20.0, 0.0, 20.0]))
    if draw(st.booleans()):
        row = np.round(row)
    if draw(st.booleans()):
        row[generator.integers(0, VOCABULARY, 40)] = -np.inf
    if draw(st.integers(0, 15)) == 0:
        row[draw(st.integers(0, VOCABULARY - 1))] = draw(st.sampled_from([np.nan, -np.nan, np.inf]))
    return torch.from_numpy(row.astype(np.float32))


rows = st.lists(st.tuples(logits(), generations), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows=rows, num_threads=st.sampled_from([1, 2, 3]), data=st.data())
def test_neighbours_leave_no_trace(
    rows: list[tuple[torch.Tensor, Drawn]], num_threads: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    torch.set_num_threads(1)
    alone = [sample_full(row.unsqueeze(0), [generation]) for row, generation in rows]
    torch.set_num_threads(num_threads)
    together = sample_full(torch.stack([rows[i][0] for i in order]), [rows[i][1] for i in order])
    for place, index in enumerate(order):
        assert together.tokens[place] == alone[index].tokens[0]
        assert together.logprobs.get(place) == alone[index].logprobs.get(0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(row=logits(), generation=generations)
def test_a_row_draws_what_the_definition_says(row: torch.Tensor, generation: Drawn) -> None:
    sampled = sample_full(row.unsqueeze(0), [generation])
    expected = reference_token(row.numpy(), generation)
    assert sampled.tokens == [expected]
    if expected == INVALID_TOKEN or generation.params.logprobs is None:
        assert sampled.logprobs == {}
        return
    log_softmax = torch.log_softmax(row.double(), dim=-1)
    ranked = sampled.logprobs[0]
    assert ranked.token_id == expected
    assert ranked.rank == 1 + int((row > row[expected]).sum())
    assert len(ranked.top) == generation.params.logprobs
    for token, logprob in [(expected, ranked.logprob), *ranked.top]:
        # One that is impossible has the lowest finite number.
        assert logprob == pytest.approx(max(log_softmax[token].item(), LOWEST), abs=4e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 3.0, "top_p": 0.97},
        {"top_p": 0.6},
        {"top_k": 30, "top_p": 0.9},
        {"top_k": 2500},
        {"min_p": 0.02, "top_k": 100, "top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.25},
        {"temperature": 0.0, "frequency_penalty": 0.7},
    ],
    ids=str,
)
def test_large_vocabularies_too(settings: dict[str, object]) -> None:
    generator = np.random.default_rng(5)
    row = (generator.standard_normal(6001) * 2.5).astype(np.float32)
    output = generator.integers(0, 6001, 300).tolist()
    generation = Drawn(
        SamplingParams.model_validate(settings), output=output, bad_words=[[int(row.argmax())]]
    )
    for choice in range(4):
        generation.choice = choice
        generation.sampler_state = None
        logits = torch.from_numpy(row).unsqueeze(0)
        assert sample_full(logits, [generation]).tokens == [reference_token(row, generation)]


def test_what_the_scratch_memory_holds_does_not_matter() -> None:
    sampler = Sampler()
    settings = {"temperature": 1.1, "top_k": 90, "top_p": 0.9, "min_p": 0.01}
    rows = [Drawn(SamplingParams.model_validate(settings), seed=seed) for seed in range(20)]
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((20, 777)).astype(np.float32))
    tokens = sampler.sample(logits, rows).tokens
    for rubbish in (0, -1, 2**62 + 12345):
        sampler._scratch.fill(rubbish)
        assert sampler.sample(logits, rows).tokens == tokens
    assert (
        sampler.sample(logits[:, :50].contiguous(), rows).tokens
        == Sampler().sample(logits[:, :50], rows).tokens
    )
