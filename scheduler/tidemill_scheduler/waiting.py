"""The waiting sequences, in the order of service, however many they are."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from tidemill_scheduler.errors import IntegrityError
from tidemill_scheduler.sequence import Rank, Sequence, SequenceId, SequenceState


class WaitingQueue:
    """A heap with lazy deletion: a sequence that finishes while it waits is dropped when it surfaces.

    Forks whose parent has yet to compute their prompt stand aside. They are neither seen nor in
    anybody's way until `release_forks` puts them in their places: no step walks over them.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._num_finished = 0
        self._aside: dict[SequenceId, dict[SequenceId, Sequence]] = {}  # forks by id, under their parent's
        self._num_aside = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished + self._num_aside

    @property
    def has_aside(self) -> bool:
        """Whether any fork waits for its parent."""
        return self._num_aside > 0

    def push(self, sequence: Sequence) -> None:
        """Put a sequence in the place that its rank says, or aside."""
        if sequence.parent is not None and sequence.waits_for_parent:
            self._aside.setdefault(sequence.parent.id, {})[sequence.id] = sequence
            self._num_aside += 1
        else:
            heappush(self._heap, (sequence.rank, sequence))

    def head(self) -> Sequence | None:
        """The first in the order, left where it is."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.state is not SequenceState.WAITING:
                heappop(self._heap)
                self._num_finished -= 1
            elif sequence.waits_for_parent:  # once more: the parent was preempted, and now runs again
                heappop(self._heap)
                self.push(sequence)
            else:
                return sequence
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

    def release_forks(self, parent: Sequence) -> None:
        """Let the forks of a sequence wait in their places, unless it has yet to compute their prompt."""
        forks = self._aside.get(parent.id)
        if not forks or next(iter(forks.values())).waits_for_parent:
            return
        del self._aside[parent.id]
        self._num_aside -= len(forks)
        self.push_back(forks.values())

    def note_finished(self, sequence: Sequence) -> None:
        """Be told that a sequence in here has finished.

        The heap is rebuilt when most of it has, so that memory follows the number waiting.
        """
        if self._leave_aside(sequence):
            return
        self._num_finished += 1
        if 2 * self._num_finished > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].state is SequenceState.WAITING]
            heapify(self._heap)
            self._num_finished = 0

    def _leave_aside(self, sequence: Sequence) -> bool:
        parent = sequence.parent
        forks = None if parent is None else self._aside.get(parent.id)
        if parent is None or not forks or forks.pop(sequence.id, None) is None:
            return False
        self._num_aside -= 1
        if not forks:
            del self._aside[parent.id]
        return True

    def check_integrity(self) -> None:
        """Whoever stands aside waits for a parent that will compute the prompt.

        Raises:
            IntegrityError: naming the sequence.
        """
        forks = [(parent_id, fork) for parent_id, aside in self._aside.items() for fork in aside.values()]
        if len(forks) != self._num_aside:
            raise IntegrityError(f"{len(forks)} forks stand aside, counted {self._num_aside}")
        for parent_id, fork in forks:
            if fork.state is not SequenceState.WAITING or fork.parent is None:
                raise IntegrityError(f"sequence {fork.id} stands aside for nobody, or waits no longer")
            if fork.parent.id != parent_id or not fork.waits_for_parent:
                raise IntegrityError(f"sequence {fork.id} stands aside, its parent has nothing to compute")
