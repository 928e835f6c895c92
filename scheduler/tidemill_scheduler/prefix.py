"""What of a waiting sequence need not be computed: found by hash, or in the blocks of a sibling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tidemill_scheduler.block_pool import BlockPool, extend_chain
from tidemill_scheduler.sequence import BlockId, Sequence
from tidemill_scheduler.swap_space import SwapSpace


@dataclass(frozen=True)
class Prefix:
    """The beginning of a sequence whose KV exists once the plans in flight have run."""

    blocks: list[BlockId | None]
    """Full blocks, to be shared; nobody writes them any more. `None` for what lies in the swap space."""
    num_tokens: int
    """Positions that need not be computed."""
    num_hashed_blocks: int
    """How many of `blocks`, from the first on, the pool was asked to know by their hash."""
    is_fork: bool = False
    """Whether these are the parent's blocks."""
    copy_source: BlockId | None = None
    """The parent's block that holds the positions after `blocks`. It is not full, so it is copied."""

    @cached_property
    def device_blocks(self) -> list[BlockId]:
        """Those that need no copy."""
        return [block for block in self.blocks if block is not None]


def find_prefix(sequence: Sequence, pool: BlockPool, swap: SwapSpace, block_size: int) -> Prefix:
    """The longest there is for a sequence that is about to be placed, all but its last token at most."""
    if sequence.parent is not None and not sequence.block_hashes:
        num_shared = sequence.num_shareable_tokens // block_size
        sequence.block_hashes = sequence.parent.block_hashes[:num_shared]
    cached = _cached_prefix(sequence, pool, swap, block_size)
    if sequence.parent is not None and sequence.parent.can_be_forked:
        shared = _shared_prefix(sequence, sequence.parent, block_size)
        return shared if shared.num_tokens >= cached.num_tokens else cached
    return cached


def _cached_prefix(sequence: Sequence, pool: BlockPool, swap: SwapSpace, block_size: int) -> Prefix:
    """A chain may change tiers from block to block: the device evicts its end first."""
    blocks: list[BlockId | None] = []
    for block_hash in sequence.block_hashes[: num_matchable_blocks(sequence, block_size)]:
        block = pool.find(block_hash)
        if block is None and block_hash not in swap:
            break
        blocks.append(block)
    return Prefix(blocks, len(blocks) * block_size, len(blocks))


def num_matchable_blocks(sequence: Sequence, block_size: int) -> int:
    """Full blocks that may be taken over, their hashes made known: the last token is always computed."""
    num_blocks = min((sequence.num_tokens - 1) // block_size, len(sequence.token_ids) // block_size)
    extend_chain_of(sequence, num_blocks, block_size)
    if sequence.compute_prompt:
        return min(num_blocks, sequence.num_recompute_tokens // block_size)
    return num_blocks


def _shared_prefix(fork: Sequence, parent: Sequence, block_size: int) -> Prefix:
    num_tokens = fork.num_shareable_tokens
    num_blocks, rest = divmod(num_tokens, block_size)
    return Prefix(
        [*parent.block_table[:num_blocks]],
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
