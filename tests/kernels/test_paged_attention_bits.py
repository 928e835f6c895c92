"""A row's bits depend on its own position, query, keys and values, and on nothing else.

Every comparison is `==`. Alone means: one sequence, one row at a time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.kernels.factories import Batch, Model, Tokens, make_batch, make_tokens
from tidemill_kernels.paged_attention import paged_attention

MODELS = [
    Model(9, 3, 64),
    Model(4, 4, 80),
    Model(8, 1, 16),
    Model(5, 1, 13),
    Model(9, 3, 64, window=20),
    Model(2, 2, 24, window=1),
    Model(4, 1, 16, window=65, has_sinks=True),
    Model(4, 2, 32, softcap=2.0),
    Model(8, 1, 16, has_sinks=True),
    Model(7, 1, 48, window=33, softcap=0.5, has_sinks=True),
]


def attend(batch: Batch) -> torch.Tensor:
    return paged_attention(*batch.tensors, **batch.options)


@functools.cache
def alone(model: Model) -> torch.Tensor:
    """Every row of a sequence of 150 tokens, each in a batch of its own."""
    tokens = make_tokens(150, model)
    return torch.cat([attend(make_batch([(tokens, p, p + 1)], model, seed=p)) for p in range(150)])


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("chunk", [2, 7, 16, 17, 37, 64, 150])
def test_every_chunking_of_a_prompt(model: Model, chunk: int) -> None:
    tokens = make_tokens(150, model)
    chunks = [
        attend(make_batch([(tokens, start, min(start + chunk, 150))], model, seed=start))
        for start in range(0, 150, chunk)
    ]
    assert torch.equal(torch.cat(chunks), alone(model))


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_any_company_in_any_order(model: Model, seed: int) -> None:
    # Given sequences of which some decode and some prefill, in random order
    chance = random.Random(seed)
    parts = []
    for number in range(chance.randint(2, 12)):
        length = chance.randint(1, 170)
        start = length - 1 if number % 2 else chance.randrange(length)
        parts.append((make_tokens(length, model, seed=number), start, length))
    chance.shuffle(parts)
    # When they are computed together
    batch = make_batch(parts, model, seed=seed)
    together = attend(batch)
    # Then each row is what it is alone
    for first, (tokens, start, stop) in zip(batch.query_starts.tolist(), parts, strict=False):
        for position in (start, (start + stop) // 2, stop - 1):
            row = attend(make_batch([(tokens, position, position + 1)], model, seed=seed + 9))
            assert torch.equal(together[first + position - start], row[0]), position


@pytest.mark.parametrize("model", [Model(), Model(window=50, softcap=3.0, has_sinks=True)], ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 8, 32, 64, 100])
def test_other_block_ids_and_block_sizes(model: Model, block_size: int) -> None:
    tokens = make_tokens(201, model)
    expected = attend(make_batch([(tokens, 100, 201)], model, block_size=16, seed=1))
    got = attend(make_batch([(tokens, 100, 201)], model, block_size=block_size, seed=2))
    assert torch.equal(got, expected)


def test_heads_of_a_group_do_not_feel_each_other() -> None:
    # Given grouped heads, and the same heads each with a KV head of its own
    model = Model(12, 2, 64, window=40, softcap=2.0, has_sinks=True)
    tokens = make_tokens(90, model)
    ungrouped = Tokens(tokens.query, tokens.key.repeat_interleave(6, 1), tokens.value.repeat_interleave(6, 1))
    assert torch.equal(
        attend(make_batch([(tokens, 60, 90)], model)),
        attend(make_batch([(ungrouped, 60, 90)], replace(model, num_kv_heads=12))),
    )


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("model", [Model(), Model(window=50, softcap=3.0, has_sinks=True)], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_one_thread_and_two(model: Model, rows: int) -> None:
    parts = [(make_tokens(100 + s, model, seed=s), 100 + s - rows, 100 + s) for s in range(12)]
    batch = make_batch(parts, model)
    with_two = [attend(batch) for _ in range(5)]
    torch.set_num_threads(1)
    expected = attend(batch)
    assert all(torch.equal(result, expected) for result in with_two)
