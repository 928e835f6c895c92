"""What of a waiting sequence need not be computed: found by hash, or in the blocks of a sibling."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill_scheduler.block_pool import BlockPool, extend_chain
from tidemill_scheduler.sequence import BlockId, Sequence


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a sequence whose KV exists once the plans in flight have run."""

    blocks: list[BlockId]
    """Full blocks, to be shared; nobody writes them any more."""
    num_tokens: int
    """Positions that need not be computed."""
    num_hashed_blocks: int
    """How many of `blocks`, from the first on, the pool was asked to know by their hash."""
    is_fork: bool = False
    """Whether these are the parent's blocks."""
    copy_source: BlockId | None = None
    """The parent's block that holds the positions after `blocks`. It is not full, so it is copied."""


def find_prefix(sequence: Sequence, pool: BlockPool, block_size: int) -> Prefix:
    """The longest there is for a sequence that is about to be placed, all but its last token at most."""
    if sequence.parent is not None and not sequence.block_hashes:
        num_shared = sequence.num_shareable_tokens // block_size
        sequence.block_hashes = sequence.parent.block_hashes[:num_shared]
    cached = _cached_prefix(sequence, pool, block_size)
    if sequence.parent is not None and sequence.parent.can_be_forked:
        shared = _shared_prefix(sequence, sequence.parent, block_size)
        return shared if shared.num_tokens >= cached.num_tokens else cached
    return cached


def _cached_prefix(sequence: Sequence, pool: BlockPool, block_size: int) -> Prefix:
    num_blocks = min((sequence.num_tokens - 1) // block_size, len(sequence.token_ids) // block_size)
    extend_chain_of(sequence, num_blocks, block_size)
    if sequence.compute_prompt:
        num_blocks = min(num_blocks, sequence.num_recompute_tokens // block_size)
    blocks = pool.match(sequence.block_hashes[:num_blocks])
    return Prefix(blocks, len(blocks) * block_size, len(blocks))


def _shared_prefix(fork: Sequence, parent: Sequence, block_size: int) -> Prefix:
    num_tokens = fork.num_shareable_tokens
    num_blocks, rest = divmod(num_tokens, block_size)
    return Prefix(
        parent.block_table[:num_blocks],
        num_tokens,
        min(num_blocks, parent.num_hashed_blocks),
        is_fork=True,
        copy_source=parent.block_table[num_blocks] if rest else None,
    )


def extend_chain_of(sequence: Sequence, num_blocks: int, block_size: int) -> None:
    """Know the hashes of at least so many of a sequence's full blocks."""
    extend_chain(
        sequence.block_hashes,
        sequence.token_ids,
        root=sequence.chain_root,
        num_blocks=num_blocks,
        block_size=block_size,
    )


def register(sequence: Sequence, num_full_blocks: int, pool: BlockPool, block_size: int) -> None:
    """Let blocks that have been computed in full be found by their hash."""
    extend_chain_of(sequence, num_full_blocks, block_size)
    for index in range(sequence.num_hashed_blocks, num_full_blocks):
        pool.register(sequence.block_table[index], sequence.block_hashes[index])
    sequence.num_hashed_blocks = num_full_blocks
