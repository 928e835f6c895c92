"""Cross-checks between sequences, plans in flight and the block pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import pairwise

from tidemill_scheduler.block_pool import BlockPool
from tidemill_scheduler.errors import IntegrityError
from tidemill_scheduler.plan import Flight, Row
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
    for block, block_hash in zip(table, sequence.block_hashes[: sequence.num_hashed_blocks], strict=False):
        if pool.hash_of(block) not in (None, block_hash):
            return f"block {block} is known by another content"
    for block in table[sequence.num_hashed_blocks :]:
        if pool.num_holders(block) > 1 or pool.hash_of(block) is not None:
            return f"block {block}, not full yet, is shared or known by a hash"
    return None


def check_flights(flights: Iterable[Flight], pool: BlockPool, block_size: int) -> None:
    """No block is written for two sequences, and none that a plan in flight names is free.

    Raises:
        IntegrityError: naming the block.
    """
    writers: dict[BlockId, Sequence] = {}
    for flight in flights:
        for sequence, row in zip(flight.sequences, flight.plan.rows, strict=True):
            for block in row.block_tables[0]:
                if pool.is_free(block):
                    raise IntegrityError(f"block {block} is free, step {flight.plan.step_id} names it")
            for block in _written(row, block_size):
                if writers.setdefault(block, sequence) is not sequence:
                    raise IntegrityError(f"block {block} is written for two sequences")


def _written(row: Row, block_size: int) -> Iterator[BlockId]:
    for index in range(row.start // block_size, (row.start + row.count - 1) // block_size + 1):
        yield row.block_tables[0][index]
