"""One planned step as tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill.params import SamplingParams
from tidemill_scheduler.plan import Row, StepPlan
from tidemill_scheduler.sequence import SequenceId


class Generation(Protocol):
    """What the runner needs to know of a sequence while it executes a step."""

    sampler_state: object | None
    """The sampler's own notes: `None` at first, and whenever they are lost."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and generated tokens, so far."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def seed(self) -> int: ...

    @property
    def choice(self) -> int:
        """Which of several generations of one prompt it is; each draws from noise of its own."""

    @property
    def end_tokens(self) -> Collection[int]:
        """Tokens that may not be drawn before there are `min_tokens`."""

    @property
    def bad_words(self) -> Sequence[Sequence[int]]:
        """Token sequences that may not be generated."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many likeliest tokens to report for each prompt token; `None` to report nothing."""

    def allowed_tokens(self) -> NDArray[np.uint32] | None:
        """Bit `i % 32` of word `i // 32` says whether token `i` may come next; `None`: all may.

        Tokens past the last word may not. May wait for another thread, so it is asked late.
        """


Generations = Mapping[SequenceId, Generation]


@dataclass(frozen=True)
class PagedBatch:
    """The rows of a step, packed without padding, `n` tokens of `s` sequences.

    Attributes:
        input_ids: int64 `[1, n]`.
        positions: int64 `[1, n]`.
        slots: int64 `[n]`, block * block_size + offset: where each token's key and value go.
        query_starts: int32 `[s + 1]`, the first row of each sequence.
        context_lens: int32 `[s]`, tokens in the cache once this step's are written.
        block_tables: int32 `[s, blocks of the longest]`.
        sampled_rows: int64 `[k]`, the rows whose logits are needed.
        sampled: the sequences of these rows, in the same order.
        kv_cache: `[block, layer, 2, kv_head, token, dim]`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    sampled_rows: torch.Tensor
    sampled: tuple[SequenceId, ...]
    kv_cache: torch.Tensor


def build_batch(plan: StepPlan, generations: Generations, kv_cache: torch.Tensor) -> PagedBatch:
    """Lay out the rows of `plan` for one forward call over `kv_cache`, on its device."""
    rows, device = plan.rows, kv_cache.device
    block_size = kv_cache.shape[4]
    counts = np.array([row.count for row in rows], dtype=np.int32)
    starts = np.array([row.start for row in rows], dtype=np.int32)
    query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    tables = _block_tables(rows)

    # Position of each packed token: its index in the batch, less its row's start there, plus the
    # row's first position.
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
    blocks = tables[np.repeat(np.arange(len(rows)), counts), positions // block_size]
    sampled = np.array([row.sample for row in rows], dtype=bool)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return PagedBatch(
        input_ids=tensor(_input_ids(rows, generations)).unsqueeze(0),
        positions=tensor(positions.astype(np.int64)).unsqueeze(0),
        slots=tensor(blocks.astype(np.int64) * block_size + positions % block_size),
        query_starts=tensor(query_starts),
        context_lens=tensor(starts + counts),
        block_tables=tensor(tables),
        sampled_rows=tensor(query_starts[1:][sampled].astype(np.int64) - 1),
        sampled=tuple(row.sequence for row in rows if row.sample),
        kv_cache=kv_cache,
    )


def _input_ids(rows: Sequence[Row], generations: Generations) -> np.ndarray:
    ids: list[int] = []
    for row in rows:
        ids.extend(generations[row.sequence].token_ids[row.start : row.start + row.count])
    return np.array(ids, dtype=np.int64)


def _block_tables(rows: Sequence[Row]) -> np.ndarray:
    """All tables in one array; what lies past the end of a table is never read."""
    tables = [row.block_tables[0] for row in rows]
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for index, table in enumerate(tables):
        padded[index, : len(table)] = table
    return padded
