"""The waiting sequences, in the order of service, however many they are."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from tidemill_scheduler.sequence import Rank, Sequence, SequenceState


class WaitingQueue:
    """A heap with lazy deletion: a sequence that finishes while it waits is dropped when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._num_finished = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished

    def push(self, sequence: Sequence) -> None:
        """Put a sequence in the place that its rank says."""
        heappush(self._heap, (sequence.rank, sequence))

    def head(self) -> Sequence | None:
        """The first in the order, left where it is."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.state is SequenceState.WAITING:
                return sequence
            heappop(self._heap)
            self._num_finished -= 1
        return None

    def pop(self) -> Sequence | None:
        """Take out the first in the order."""
        sequence = self.head()
        if sequence is not None:
            heappop(self._heap)
        return sequence

    def push_back(self, sequences: Iterable[Sequence]) -> None:
        """Return what was popped and could not be admitted."""
        for sequence in sequences:
            self.push(sequence)

    def note_finished(self) -> None:
        """One of the sequences in here has finished.

        The heap is rebuilt when most of it has, so that memory follows the number waiting.
        """
        self._num_finished += 1
        if self._num_finished > len(self):
            self._heap = [entry for entry in self._heap if entry[1].state is SequenceState.WAITING]
            heapify(self._heap)
            self._num_finished = 0
