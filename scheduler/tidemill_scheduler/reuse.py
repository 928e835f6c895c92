"""How often what the device evicts is asked for again."""

from __future__ import annotations

from collections import OrderedDict

from tidemill_scheduler.sequence import BlockHash


class ReuseEstimate:
    """Learns from all evicted contents, whether they were saved or not.

    A history of the last ones, as many as there could have been saved, says which would be found now:
    the ghost list of the ARC cache (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement
    Cache", FAST '03), used here to decide about saving at all.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._history: OrderedDict[BlockHash, None] = OrderedDict()
        self._num_evicted = 1.0  # with the next line: at first, all is taken to be of use
        self._num_wanted = 1.0

    @property
    def share(self) -> float:
        """Of the evicted contents, 0 to 1, those that were asked for again, the latest counting most."""
        return min(1.0, self._num_wanted / self._num_evicted)

    def note_evicted(self, block_hash: BlockHash) -> None:
        """A content has lost its block of the device."""
        self._history[block_hash] = None
        self._history.move_to_end(block_hash)
        self._num_evicted += 1
        if len(self._history) > self._capacity:
            self._history.popitem(last=False)
        if self._num_evicted > 2 * self._capacity:
            self._num_evicted /= 2
            self._num_wanted /= 2

    def note_wanted(self, block_hash: BlockHash) -> bool:
        """A sequence needs this content; say whether it was evicted lately."""
        if block_hash not in self._history:
            return False
        del self._history[block_hash]
        self._num_wanted += 1
        return True
