"""What one step does, as plain frozen integers: the contract between scheduler and runner."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill_scheduler.sequence import BlockId, SequenceId


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive positions of one sequence to compute in this step.

    A row carries no token ids: the runner looks them up by position when it executes the plan, so
    that a plan may be made before the tokens of the one before it have been sampled.
    """

    sequence: SequenceId
    start: int
    """Position of the first token to compute; everything before it is in the cache by then."""
    count: int
    """Tokens to compute: positions `start` to `start + count - 1`, at least one."""
    block_tables: tuple[tuple[BlockId, ...], ...]
    """One block table per KV group. Position `p` lives in entry `p // block_size`, at offset
    `p % block_size`. A table may be longer than this row needs."""
    sample: bool
    """Whether the last of these positions yields the sequence's next token, at index
    `start + count`."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole block, all layers of it."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine. Executed in this order: swap out, swap in, block copies, rows.

    Plans are executed in the order of their `step_id`. An empty plan is not in flight: it is
    neither executed nor given back to `Scheduler.update`.
    """

    step_id: int
    rows: tuple[Row, ...] = ()
    swap_out: tuple[BlockCopy, ...] = ()
    """From the device's blocks to the CPU tier's."""
    swap_in: tuple[BlockCopy, ...] = ()
    """From the CPU tier's blocks to the device's."""
    block_copies: tuple[BlockCopy, ...] = ()
    """Between the device's blocks. No target is the source or target of another."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes, over all rows."""
        return sum(row.count for row in self.rows)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to execute."""
        return not (self.rows or self.swap_out or self.swap_in or self.block_copies)
