"""The block copies of the step being planned: between the tiers, and for forks that share a block in part."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill_scheduler.block_pool import BlockPool
from tidemill_scheduler.plan import BlockCopy
from tidemill_scheduler.sequence import BlockId, Sequence


@dataclass(frozen=True, slots=True)
class StepCopies:
    """What one plan copies, in the order of execution, and the fork of each block copy."""

    swap_out: tuple[BlockCopy, ...]
    swap_in: tuple[BlockCopy, ...]
    block_copies: tuple[BlockCopy, ...]
    forks: tuple[Sequence, ...]


class PlannedCopies:
    """What the next plan will copy, and the hold on the device's blocks that it names.

    What is copied from, and what is swapped in, is held until the plan is made, and from then on in
    quarantine until the plan has returned: a source keeps its content whatever becomes of its table
    meanwhile, and what was swapped in for a sequence that has gone again is there for the next one.
    The target of a fork's copy is a new block of its table. So no block is copied from and copied
    over in one plan, but for a block that is swapped out to be written anew.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._forks: dict[Sequence, BlockCopy] = {}
        self._swap_out: list[BlockCopy] = []
        self._swap_in: list[BlockCopy] = []
        self._arriving: set[BlockId] = set()

    @property
    def num_saved(self) -> int:
        """Blocks that the next plan swaps out."""
        return len(self._swap_out)

    def brings(self, block: BlockId) -> bool:
        """Whether the next plan swaps this block in, and holds it besides its tables."""
        return block in self._arriving

    def swap_out(self, source: BlockId, target: BlockId) -> None:
        """Save the device's block `source` to the slot `target` of the swap space before it is written."""
        self._pool.acquire([source])
        self._swap_out.append(BlockCopy(source, target))

    def swap_in(self, source: BlockId, target: BlockId) -> None:
        """Bring the slot `source` of the swap space to the device's block `target`."""
        self._pool.acquire([target])
        self._arriving.add(target)
        self._swap_in.append(BlockCopy(source, target))

    def add(self, fork: Sequence, source: BlockId, target: BlockId) -> None:
        """Copy the parent's block `source` to `target` before the rows of the next plan."""
        parents = self._forks.get(fork.parent) if fork.parent is not None else None
        if parents is not None:
            source = parents.source  # the parent has its own only after the same copies
        self._pool.acquire([source])
        self._forks[fork] = BlockCopy(source, target)

    def drop(self, fork: Sequence, *, last_step: int | None) -> None:
        """Copy nothing for a fork that has lost its table; `last_step` as in `BlockPool.free`."""
        copy = self._forks.pop(fork, None)
        if copy is not None:
            self._pool.free([copy.source], last_step=last_step)

    def take(self, step_id: int) -> StepCopies:
        """Hand everything over to the plan of this step."""
        forks, out, back = self._forks, self._swap_out, self._swap_in
        self._forks, self._swap_out, self._swap_in = {}, [], []
        self._arriving.clear()
        named = [copy.source for copy in (*forks.values(), *out)] + [copy.target for copy in back]
        self._pool.free(named, last_step=step_id)
        return StepCopies(tuple(out), tuple(back), tuple(forks.values()), tuple(forks))
