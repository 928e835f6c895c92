"""What each hash stands for, so that what a tier holds can be compared with what it is said to hold."""

from __future__ import annotations

from tests.scheduler.fake_model import FakeModel, Slot
from tidemill_scheduler import BlockId, Scheduler, Sequence, SequenceId
from tidemill_scheduler.sequence import BlockHash


class KnownContents:
    """Learns from the sequences' own chains; nothing is forgotten, since the tiers outlive sequences."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._contents: dict[BlockHash, list[Slot]] = {}
        self._num_learnt: dict[SequenceId, int] = {}

    def learn(self, sequence: Sequence) -> None:
        size = self._block_size
        for index in range(self._num_learnt.get(sequence.id, 0), len(sequence.block_hashes)):
            block = range(index * size, (index + 1) * size)
            content = [(sequence.token_ids[position], position) for position in block]
            assert self._contents.setdefault(sequence.block_hashes[index], content) == content
        self._num_learnt[sequence.id] = len(sequence.block_hashes)

    def check(self, scheduler: Scheduler, model: FakeModel) -> None:
        """Every block that is known by a hash holds that content; for when no plan is in flight."""
        pool, swap = scheduler._memory.pool, scheduler._memory.swap
        for block in map(BlockId, range(pool.num_blocks)):
            known = pool.hash_of(block)
            assert known is None or model.blocks[block] == self._contents[known], f"block {block}"
        for known, slot in swap._slots.items():
            assert model.swap_blocks[slot] == self._contents[known], f"swap block {slot}"
