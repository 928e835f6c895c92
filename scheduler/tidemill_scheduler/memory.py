"""Both tiers of KV memory, from the sequences' side: tables are filled, grown and given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from tidemill_scheduler import policy
from tidemill_scheduler.block_pool import BlockPool, private_root, shared_root
from tidemill_scheduler.config import SchedulerConfig
from tidemill_scheduler.copies import PlannedCopies, StepCopies
from tidemill_scheduler.costs import PreemptionMode, RestoreCosts
from tidemill_scheduler.counters import Counters
from tidemill_scheduler.prefix import Prefix, extend_chain_of, find_prefix
from tidemill_scheduler.reuse import ReuseEstimate
from tidemill_scheduler.sequence import BlockHash, BlockId, Sequence
from tidemill_scheduler.swap_space import SwapSpace

MAX_SAVES = 64
"""Blocks that one plan saves for nobody in particular: 128 MiB of a model with 128 KiB of KV a token,
which takes a few milliseconds on its way out. A long prompt that comes into a full cache evicts
thousands, and its neighbours wait for the copies."""


class KVMemory:
    """The device's blocks, the swap space behind them, and the copies that the next plan makes.

    Swapping is lazy. A preempted sequence gives its blocks back like any other; they stay known by
    their hash, and only when one is given to somebody else is its content saved to the swap space,
    in the same plan, before the block is written. So nothing is copied that need not be, nothing that
    others still hold, and coming back is a prefix hit on whichever tier has the block.
    """

    def __init__(self, config: SchedulerConfig, counters: Counters) -> None:
        recomputes = config.preemption_mode is PreemptionMode.RECOMPUTE
        self.costs = RestoreCosts()
        self.pool = BlockPool(config.num_blocks, on_evict=self._save)
        self.swap = SwapSpace(0 if recomputes else config.num_swap_blocks)
        self._reuse = ReuseEstimate(self.swap.num_blocks)
        self._config = config
        self._counters = counters
        self._copies = PlannedCopies(self.pool)

    def chain_root(self, sequence: Sequence) -> BlockHash:
        """Where a new sequence's hash chain starts."""
        if sequence.parent is not None:
            return sequence.parent.chain_root
        shared = self._config.enable_prefix_caching
        return shared_root(sequence.salt) if shared else private_root(sequence.arrival)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """What a waiting sequence would find computed if it were placed now."""
        return find_prefix(sequence, self.pool, self.swap, self._config.block_size)

    def missing_blocks(self, sequence: Sequence, prefix: Prefix) -> int:
        """Blocks that would have to become free for a waiting sequence to be placed; 0 or less if none."""
        found = prefix.device_blocks
        needed = self._blocks_for(sequence) - len(found)
        return needed - (self.pool.num_free - self.pool.count_free(found))

    def place(self, sequence: Sequence, prefix: Prefix) -> None:
        """Give a waiting sequence blocks for all its known tokens; none may be missing."""
        swapped = [
            block_hash
            for block_hash, block in zip(sequence.block_hashes, prefix.blocks, strict=False)
            if block is None
        ]
        slots = [self.swap.read(block_hash) for block_hash in swapped]  # first: evicting might replace them
        self.pool.acquire(prefix.device_blocks)
        new = self.pool.allocate(self._blocks_for(sequence) - len(prefix.device_blocks))
        arriving, rest = iter(new[: len(slots)]), new[len(slots) :]
        table = [next(arriving) if block is None else block for block in prefix.blocks] + rest
        for slot, block, block_hash in zip(slots, new, swapped, strict=False):
            self._copies.swap_in(slot, block)
            self.pool.register(block, block_hash)  # whoever reads it runs after the copy
        if prefix.copy_source is not None:
            self._copies.add(sequence, prefix.copy_source, rest[0])
        self._set_table(sequence, table)
        sequence.num_hashed_blocks = prefix.num_hashed_blocks
        sequence.num_computed_tokens = prefix.num_tokens
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(prefix.num_tokens, sequence.num_prompt_tokens)
        self._learn(sequence, prefix, swapped)
        self.let_go(sequence)

    def missing_to_grow(self, sequence: Sequence) -> int:
        """Blocks that a running sequence lacks for its known tokens."""
        return self._blocks_for(sequence) - len(sequence.block_table)

    def grow(self, sequence: Sequence) -> None:
        """Give a running sequence the blocks it lacks; they must be free."""
        self._set_table(sequence, sequence.block_table + self.pool.allocate(self.missing_to_grow(sequence)))

    def vacate(self, sequence: Sequence, *, last_step: int | None) -> None:
        """Take a sequence's blocks from it; `last_step` as in `BlockPool.free`."""
        self._copies.drop(sequence, last_step=last_step)
        self.pool.free(sequence.block_table, last_step=last_step)
        self._set_table(sequence, [])
        sequence.num_hashed_blocks = 0
        sequence.num_computed_tokens = 0

    def register(self, sequence: Sequence, num_full_blocks: int) -> None:
        """Let blocks that have been computed in full be found by their hash."""
        extend_chain_of(sequence, num_full_blocks, self._config.block_size)
        for index in range(sequence.num_hashed_blocks, num_full_blocks):
            self.pool.register(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_hashed_blocks = num_full_blocks

    def keep(self, sequence: Sequence) -> bool:
        """Decide over the blocks of a sequence that is about to be preempted.

        Returns:
            whether the swap space keeps at least the beginning of them, until it is placed again.
        """
        hashes = sequence.block_hashes[: sequence.num_hashed_blocks]
        lost = [
            block_hash
            for block_hash, block in zip(hashes, sequence.block_table, strict=False)
            if self.pool.num_holders(block) == 1 + self._copies.brings(block)
        ]
        num_out = sum(block_hash not in self.swap for block_hash in lost)
        if not lost or not self._prefers_swap(num_out=num_out, num_in=len(lost)):
            return False
        sequence.num_kept_blocks = self.swap.keep(hashes)
        return sequence.num_kept_blocks > 0

    def let_go(self, sequence: Sequence) -> None:
        """Keep nothing for a sequence any more: it has been placed, or has ended."""
        self.swap.let_go(sequence.block_hashes[: sequence.num_kept_blocks])
        sequence.num_kept_blocks = 0

    def restore_seconds(self, sequence: Sequence) -> float:
        """What bringing a running sequence back would cost if it were preempted now, at most."""
        num_blocks = sequence.num_hashed_blocks if self._can_swap else 0
        return policy.restore_seconds(
            num_tokens=sequence.num_computed_tokens,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            costs=self.costs,
        )

    def take_copies(self, step_id: int) -> StepCopies:
        """Hand everything that is to be copied over to the plan of this step."""
        self.swap.end_plan()
        copies = self._copies.take(step_id)
        self._counters.num_blocks_swapped_out += len(copies.swap_out)
        self._counters.num_blocks_swapped_in += len(copies.swap_in)
        return copies

    def can_reclaim(self, count: int, sequences: Iterable[Sequence], prefix: Prefix) -> bool:
        """Whether nobody would hold `count` blocks beside this prefix if these sequences were preempted."""
        tables: Collection[list[BlockId]] = [sequence.block_table for sequence in sequences]
        return self.pool.can_reclaim(count, tables, prefix.device_blocks)

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Compare both tiers with all unfinished sequences.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        self.pool.check_integrity([sequence.block_table for sequence in sequences])
        kept: Counter[BlockHash] = Counter()
        for sequence in sequences:
            kept.update(sequence.block_hashes[: sequence.num_kept_blocks])
        self.swap.check_integrity(kept)

    def _count_hits(self, sequence: Sequence, prefix: Prefix) -> None:
        asks = not (prefix.is_fork or sequence.compute_prompt)
        if self._config.enable_prefix_caching and asks:
            self._counters.num_prefix_query_tokens += sequence.num_tokens
            self._counters.num_prefix_hit_tokens += prefix.num_tokens
            self._counters.num_swap_hit_tokens += prefix.blocks.count(None) * self._config.block_size

    def _save(self, block: BlockId, block_hash: BlockHash) -> None:
        """A block that is known by this hash is given to somebody else."""
        if not self.swap.is_kept(block_hash) and not self._is_worth_saving(block_hash):
            return
        slot = self.swap.write(block_hash)
        if slot is not None:
            self._copies.swap_out(block, slot)

    def _is_worth_saving(self, block_hash: BlockHash) -> bool:
        if not self._config.enable_prefix_caching or not self.swap.num_blocks:
            return False
        self._reuse.note_evicted(block_hash)
        if self._copies.num_saved >= MAX_SAVES:
            return False
        return policy.is_worth_saving(
            reuse=self._reuse.share, block_size=self._config.block_size, costs=self.costs
        )

    def _learn(self, sequence: Sequence, prefix: Prefix, swapped: list[BlockHash]) -> None:
        """Note what a sequence found, and what it would have found if it had been saved."""
        if sequence.num_preemptions == 0:
            self._count_hits(sequence, prefix)
        for block_hash in swapped:
            self._reuse.note_wanted(block_hash)
        for block_hash in sequence.block_hashes[len(prefix.blocks) :]:
            if not self._reuse.note_wanted(block_hash):
                break

    @property
    def _can_swap(self) -> bool:
        return self.swap.usage < 1.0 and self._prefers_swap(num_out=1, num_in=1)

    def _prefers_swap(self, *, num_out: int, num_in: int) -> bool:
        if not self.swap.num_blocks:
            return False
        if self._config.preemption_mode is PreemptionMode.SWAP:
            return True
        return policy.prefers_swap(
            num_tokens=num_in * self._config.block_size, num_out=num_out, num_in=num_in, costs=self.costs
        )

    def _blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.num_tokens // self._config.block_size)

    def _set_table(self, sequence: Sequence, table: list[BlockId]) -> None:
        sequence.block_table = table
        sequence.block_tables = (tuple(table),)
        sequence.capacity = len(table) * self._config.block_size
