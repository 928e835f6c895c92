"""Cross-checks between sequences, plans in flight and the block pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise

from tidemill_scheduler.block_pool import BlockPool
from tidemill_scheduler.errors import IntegrityError
from tidemill_scheduler.flights import Flight
from tidemill_scheduler.plan import StepPlan
from tidemill_scheduler.sequence import BlockId, Sequence, SequenceState


def check_sequences(running: Seq[Sequence], pool: BlockPool, block_size: int) -> None:
    """Each running sequence has its place in the order, a table that fits, and blocks it may write.

    Raises:
        IntegrityError: naming the sequence.
    """
    for before, after in pairwise(running):
        if before.rank >= after.rank:
            raise IntegrityError(f"sequences {before.id} and {after.id} run out of order")
    for sequence in running:
        fault = _fault_of(sequence, pool, block_size)
        if fault:
            raise IntegrityError(f"sequence {sequence.id}: {fault}")


def _fault_of(sequence: Sequence, pool: BlockPool, block_size: int) -> str | None:
    table = sequence.block_table
    if sequence.state is not SequenceState.RUNNING:
        return f"is {sequence.state.value} among the running"
    if sequence.block_tables != (tuple(table),) or sequence.capacity != len(table) * block_size:
        return "the table of its rows differs from its block table"
    if sequence.num_computed_tokens > sequence.capacity:
        return f"computed {sequence.num_computed_tokens} tokens into room for {sequence.capacity}"
    num_full_blocks = sequence.num_computed_tokens // block_size
    for block, block_hash in zip(table, sequence.block_hashes[:num_full_blocks], strict=False):
        if pool.hash_of(block) not in (None, block_hash):
            return f"block {block} is known by another content"
    for block in table[max(num_full_blocks, sequence.num_hashed_blocks) :]:
        if pool.num_holders(block) > 1 or pool.hash_of(block) is not None:
            return f"block {block}, not full yet, is shared or known by a hash"
    return None


def check_shared_blocks(running: Iterable[Sequence], pool: BlockPool, block_size: int) -> None:
    """A block in several tables stands for the same tokens at the same positions in all of them.

    Raises:
        IntegrityError: naming the block.
    """
    contents: dict[BlockId, tuple[int, list[int]]] = {}
    for sequence in running:
        for index, block in enumerate(sequence.block_table):
            if pool.num_holders(block) > 1:
                start = index * block_size
                content = (start, sequence.token_ids[start : start + block_size])
                if contents.setdefault(block, content) != content:
                    raise IntegrityError(f"block {block} is shared by different texts")


def check_flights(flights: Iterable[Flight], pool: BlockPool, block_size: int) -> None:
    """No block is written for two sequences, and none that a plan in flight names is free.

    A block that is copied from is written, if at all, for a sequence of the same prompt, and not
    copied over in the same plan. What is swapped in is complete: no row writes it.

    Raises:
        IntegrityError: naming the block.
    """
    flights = tuple(flights)
    writers: dict[BlockId, Sequence] = {}
    for flight in flights:
        step_id = flight.plan.step_id
        for block in _named(flight.plan):
            if pool.is_free(block):
                raise IntegrityError(f"block {block} is free, step {step_id} names it")
        for sequence, block in _written(flight, block_size):
            if writers.setdefault(block, sequence) is not sequence:
                raise IntegrityError(f"block {block} is written for two sequences")
    for flight in flights:
        _check_copies(flight, writers)
        _check_swaps(flight.plan, writers)


def _check_copies(flight: Flight, writers: Mapping[BlockId, Sequence]) -> None:
    copies = flight.plan.block_copies
    targets = {copy.target for copy in copies}
    for fork, copy in zip(flight.forks, copies, strict=True):
        if copy.source in targets:
            raise IntegrityError(f"block {copy.source} is copied from and over in step {flight.plan.step_id}")
        if _prompt_of(writers.get(copy.source, fork)) != _prompt_of(fork):
            raise IntegrityError(f"block {copy.source}, copied for sequence {fork.id}, gets another text")


def _check_swaps(plan: StepPlan, writers: Mapping[BlockId, Sequence]) -> None:
    for direction, copies in (("out", plan.swap_out), ("in", plan.swap_in)):
        if len({copy.target for copy in copies}) < len(copies):
            raise IntegrityError(f"step {plan.step_id} swaps {direction} to one block twice")
    for copy in plan.swap_in:
        if copy.target in writers:
            raise IntegrityError(f"block {copy.target} is swapped in, and written by step {plan.step_id}")


def _named(plan: StepPlan) -> Iterator[BlockId]:
    for row in plan.rows:
        yield from row.block_tables[0]
    for copy in plan.block_copies:
        yield from (copy.source, copy.target)
    for copy in plan.swap_out:
        yield copy.source
    for copy in plan.swap_in:
        yield copy.target


def _written(flight: Flight, block_size: int) -> Iterator[tuple[Sequence, BlockId]]:
    for fork, copy in zip(flight.forks, flight.plan.block_copies, strict=True):
        yield fork, copy.target
    for sequence, row in zip(flight.sequences, flight.plan.rows, strict=True):
        for index in range(row.start // block_size, (row.start + row.count - 1) // block_size + 1):
            yield sequence, row.block_tables[0][index]


def _prompt_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[: sequence.num_prompt_tokens]
