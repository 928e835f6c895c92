"""Prompts that are being computed, so that whoever begins alike waits for them."""

from __future__ import annotations

from tidemill_scheduler.prefix import Prefix, num_matchable_blocks
from tidemill_scheduler.sequence import BlockHash, Sequence


class Underway:
    """The prompt blocks that running sequences are about to compute, by the hash they will be known by."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._leaders: dict[BlockHash, Sequence] = {}

    def begin(self, sequence: Sequence) -> None:
        """A sequence has been placed: it computes what of its prompt was not found."""
        last = (sequence.num_prompt_tokens - 1) // self._block_size
        for block_hash in sequence.block_hashes[sequence.num_hashed_blocks : last]:
            self._leaders.setdefault(block_hash, sequence)

    def end(self, sequence: Sequence, first: int, last: int | None = None) -> None:
        """Its blocks `first` to `last - 1` are known by their hash now; or it has lost them all."""
        for block_hash in sequence.block_hashes[first:last]:
            if self._leaders.get(block_hash) is sequence:
                del self._leaders[block_hash]

    def must_wait(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether somebody before this sequence computes what comes next in it, who is then its leader.

        Waiting costs the few steps that the leader's prompt takes, computing the same once more as many
        and a share of everybody's step besides.
        """
        end = num_matchable_blocks(sequence, self._block_size)
        next_hashes = sequence.block_hashes[len(prefix.blocks) : end]
        leader = self._leaders.get(next_hashes[0]) if next_hashes else None
        if leader is None or leader.rank > sequence.rank:
            return False
        common = 1
        while common < len(next_hashes) and self._leaders.get(next_hashes[common]) is leader:
            common += 1
        sequence.leader, sequence.num_awaited_blocks = leader, len(prefix.blocks) + common
        return True
