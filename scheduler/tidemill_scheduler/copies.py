"""Block copies of the step being planned, for forks that share a block only in part."""

from __future__ import annotations

from tidemill_scheduler.block_pool import BlockPool
from tidemill_scheduler.plan import BlockCopy
from tidemill_scheduler.sequence import BlockId, Sequence


class PlannedCopies:
    """What the next plan will copy, by the fork it is for, and the hold on what is copied from.

    A source is held until the plan is made, and from then on in quarantine until the plan has
    returned, so that it keeps its content whatever becomes of the parent meanwhile. A target is a
    new block of the fork's table. So no block is copied from and copied over in one plan.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._copies: dict[Sequence, BlockCopy] = {}

    def add(self, fork: Sequence, source: BlockId, target: BlockId) -> None:
        """Copy the parent's block `source` to `target` before the rows of the next plan."""
        parents = self._copies.get(fork.parent) if fork.parent is not None else None
        if parents is not None:
            source = parents.source  # the parent has its own only after the same copies
        self._pool.acquire([source])
        self._copies[fork] = BlockCopy(source, target)

    def drop(self, fork: Sequence, *, last_step: int | None) -> None:
        """Copy nothing for a sequence that has lost its table; `last_step` as in `BlockPool.free`."""
        copy = self._copies.pop(fork, None)
        if copy is not None:
            self._pool.free([copy.source], last_step=last_step)

    def take(self, step_id: int) -> dict[Sequence, BlockCopy]:
        """Hand everything over to the plan of this step."""
        copies, self._copies = self._copies, {}
        self._pool.free([copy.source for copy in copies.values()], last_step=step_id)
        return copies
