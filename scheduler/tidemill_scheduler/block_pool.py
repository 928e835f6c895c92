"""KV memory as blocks: who holds them, what they contain, and when they may be written anew.

Every block is in exactly one of four places. *Used*: at least one table holds it. *Quarantined*:
nobody holds it any more, but a plan in flight may still name it. *Cached*: free, its content known
by hash and found again until it is evicted, least recently used first. *Blank*: free, content void.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b

from tidemill_scheduler.errors import IntegrityError
from tidemill_scheduler.sequence import BlockHash, BlockId

DIGEST_SIZE = 16
"""Bytes of a block's hash. At 128 bits a collision, which would splice two texts, is out of reach."""


def shared_root(salt: bytes) -> BlockHash:
    """Where the chain of all sequences with this salt starts."""
    return BlockHash(blake2b(salt, digest_size=DIGEST_SIZE, person=b"salt").digest())


def private_root(arrival: int) -> BlockHash:
    """Where the chain of one sequence starts that shares nothing with any other."""
    return BlockHash(blake2b(b"%d" % arrival, digest_size=DIGEST_SIZE, person=b"sequence").digest())


def chain_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of a full block: stands for its tokens and, through `parent`, for all before them."""
    return BlockHash(blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_SIZE).digest())


def extend_chain(
    hashes: list[BlockHash], token_ids: Sequence[int], *, root: BlockHash, num_blocks: int, block_size: int
) -> None:
    """Append to a sequence's chain until it covers `num_blocks` full blocks."""
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        hashes.append(chain_hash(hashes[-1] if hashes else root, token_ids[start : start + block_size]))


class BlockPool:
    """Reference counts, the hash index and the free lists of all blocks."""

    def __init__(self, num_blocks: int, on_evict: Callable[[BlockId, BlockHash], None] | None = None) -> None:
        """`on_evict` is told of each cached block that is given away, and of the hash it was known by."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._blank = [BlockId(block) for block in reversed(range(num_blocks))]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._quarantined: dict[BlockId, int] = {}
        self._releases: deque[tuple[int, BlockId]] = deque()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_quarantined(self) -> int:
        """Blocks that become free as plans in flight return."""
        return len(self._quarantined)

    @property
    def num_used(self) -> int:
        """Blocks that some table holds."""
        return self.num_blocks - self.num_free - self.num_quarantined

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` free blocks, at most `num_free`; what evicted ones held is forgotten."""
        return [self._take() for _ in range(count)]

    def _take(self) -> BlockId:
        if self._blank:
            block = self._blank.pop()
            self._ref_counts[block] = 1
            return block
        block, _ = self._cached.popitem(last=False)
        self._ref_counts[block] = 1
        self._evict(block)
        return block

    def _evict(self, block: BlockId) -> None:
        known = self._hashes[block]
        if known is None:
            raise IntegrityError(f"block {block} is cached and has no hash")
        del self._by_hash[known]
        self._hashes[block] = None
        if self._on_evict is not None:
            self._on_evict(block, known)

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The block that holds this content."""
        return self._by_hash.get(block_hash)

    def count_free(self, blocks: Iterable[BlockId]) -> int:
        """How many of these matched blocks are counted in `num_free`."""
        return sum(map(self.is_free, blocks))

    def can_reclaim(
        self, count: int, tables: Collection[Sequence[BlockId]], kept: Iterable[BlockId] = ()
    ) -> bool:
        """Whether nobody would hold `count` blocks beside those `kept` if all these tables were freed."""
        if not 0 < count <= sum(map(len, tables)):
            return count <= 0  # settled without looking at each block, as it is in most steps
        holders = Counter(block for table in tables for block in table)
        for block in kept:
            holders.pop(block, None)
        return count <= sum(self._ref_counts[block] == held for block, held in holders.items())

    def acquire(self, blocks: Iterable[BlockId]) -> None:
        """Hold matched blocks once more, wherever they are.

        A quarantined block may be taken back at once: its content is complete, and nobody writes it.
        """
        for block in blocks:
            if self._ref_counts[block] == 0 and self._quarantined.pop(block, None) is None:
                del self._cached[block]
            self._ref_counts[block] += 1

    def free(self, table: Sequence[BlockId], *, last_step: int | None) -> None:
        """Let go of a table; blocks held by nobody else become free once `last_step` has returned.

        `last_step` is the newest plan in flight, or `None` if there is none. The end of the table is
        freed first, because a chain is of use only from its beginning on.
        """
        for block in reversed(table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if last_step is None:
                self._make_free(block)
            else:
                self._quarantined[block] = last_step
                self._releases.append((last_step, block))

    def release(self, step_id: int) -> None:
        """End the quarantine of blocks that waited for this plan or an earlier one."""
        while self._releases and self._releases[0][0] <= step_id:
            last_step, block = self._releases.popleft()
            if self._quarantined.get(block) == last_step:  # else it was acquired meanwhile
                del self._quarantined[block]
                self._make_free(block)

    def _make_free(self, block: BlockId) -> None:
        if self._hashes[block] is None:
            self._blank.append(block)
        else:
            self._cached[block] = None

    def register(self, block: BlockId, block_hash: BlockHash) -> None:
        """Make a full block findable. Of two blocks with equal content the first stays known."""
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def hash_of(self, block: BlockId) -> BlockHash | None:
        """The hash by which a block is known, if it is."""
        return self._hashes[block]

    def num_holders(self, block: BlockId) -> int:
        """How many tables hold a block."""
        return self._ref_counts[block]

    def is_free(self, block: BlockId) -> bool:
        """Whether `allocate` might hand out a block now."""
        return not self._ref_counts[block] and block not in self._quarantined

    def check_integrity(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Compare the books with each other and with all block tables there are.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        holders = Counter(block for table in tables for block in table)
        for number, ref_count in enumerate(self._ref_counts):
            if ref_count != holders[BlockId(number)]:
                raise IntegrityError(
                    f"block {number}: counted {ref_count} times, held by {holders[BlockId(number)]} tables"
                )
        places = [*self._blank, *self._cached, *self._quarantined, *holders]
        if sorted(places) != list(range(self.num_blocks)):
            raise IntegrityError("blank, cached, quarantined and used blocks are not all blocks once")
        known = {known: BlockId(number) for number, known in enumerate(self._hashes) if known is not None}
        if known != self._by_hash:
            raise IntegrityError("the hash index differs from the blocks' hashes")
        if any(self._hashes[block] is not None for block in self._blank):
            raise IntegrityError("a blank block is known by a hash")
        if any(self._hashes[block] is None for block in self._cached):
            raise IntegrityError("a cached block has no hash")
