"""The second tier of KV memory: full blocks in CPU memory, found by the same hashes.

Every slot is blank, or holds one content that is known by its hash. A content is *kept* while a
preempted sequence will need it again, and never evicted; else it is *cached*, a larger prefix cache,
evicted least recently used first. What the plan being made reads or writes is *busy* until the plan is
made, so that one plan neither writes a slot twice nor overwrites what it reads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from tidemill_scheduler.errors import IntegrityError
from tidemill_scheduler.sequence import BlockHash, BlockId


class SwapSpace:
    """Which content lies in which slot, and which may be replaced."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._slots: dict[BlockHash, BlockId] = {}
        self._blank = [BlockId(slot) for slot in reversed(range(num_blocks))]
        self._cached: OrderedDict[BlockHash, None] = OrderedDict()
        self._busy: dict[BlockHash, None] = {}
        self._keepers: Counter[BlockHash] = Counter()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slots

    @property
    def usage(self) -> float:
        """Share of the slots, 0 to 1, that is spoken for by what is kept."""
        return len(self._keepers) / self.num_blocks if self.num_blocks else 0.0

    def keep(self, hashes: Iterable[BlockHash]) -> int:
        """Reserve room for the beginning of a preempted sequence's chain, as far as there is any.

        The contents need not be here: they come when the device gives their blocks away, if it does.

        Returns:
            how many of these hashes are kept, from the first on, until `let_go` is called with them.
        """
        count = 0
        for block_hash in hashes:
            if block_hash not in self._keepers and len(self._keepers) == self.num_blocks:
                break
            self._keepers[block_hash] += 1
            self._cached.pop(block_hash, None)
            count += 1
        return count

    def let_go(self, hashes: Iterable[BlockHash]) -> None:
        """End what `keep` began; what is here stays as cached. The end of a chain goes first."""
        for block_hash in reversed(list(hashes)):
            self._keepers[block_hash] -= 1
            if not self._keepers[block_hash]:
                del self._keepers[block_hash]
                if block_hash in self._slots and block_hash not in self._busy:
                    self._cached[block_hash] = None

    def is_kept(self, block_hash: BlockHash) -> bool:
        """Whether a preempted sequence will need this content again."""
        return block_hash in self._keepers

    def read(self, block_hash: BlockHash) -> BlockId:
        """The slot of a content that the plan being made copies to the device.

        Raises:
            KeyError: if it is not here.
        """
        slot = self._slots[block_hash]
        self._occupy(block_hash)
        return slot

    def write(self, block_hash: BlockHash) -> BlockId | None:
        """The slot for a content that the plan being made copies from the device.

        `None` if it is here already, or if there is no room: then it is lost, and computed again
        should anybody need it.
        """
        if block_hash in self._slots:
            return None
        if self._blank:
            slot = self._blank.pop()
        elif self._cached:
            slot = self._slots.pop(self._cached.popitem(last=False)[0])
        else:
            return None
        self._slots[block_hash] = slot
        self._occupy(block_hash)
        return slot

    def _occupy(self, block_hash: BlockHash) -> None:
        self._busy[block_hash] = None
        self._cached.pop(block_hash, None)

    def end_plan(self) -> None:
        """The plan is made: what it touches may be replaced by the next one."""
        for block_hash in self._busy:
            if block_hash not in self._keepers:
                self._cached[block_hash] = None
        self._busy.clear()

    def check_integrity(self, kept: Counter[BlockHash]) -> None:
        """Compare the books with each other, and with what all waiting sequences keep.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        if sorted([*self._blank, *self._slots.values()]) != list(range(self.num_blocks)):
            raise IntegrityError("blank and filled slots of the swap space are not all slots once")
        if kept != self._keepers:
            raise IntegrityError("the swap space keeps other contents than the waiting sequences need")
        if len(self._keepers) > self.num_blocks:
            raise IntegrityError(f"{len(self._keepers)} contents are kept in {self.num_blocks} slots")
        replaceable = {
            known for known in self._slots if known not in self._keepers and known not in self._busy
        }
        if replaceable != set(self._cached):
            raise IntegrityError("the contents that may be replaced are not those that nobody needs")
