"""The waiting sequences, in the order of service, however many they are."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from tidemill_scheduler.errors import IntegrityError
from tidemill_scheduler.sequence import Rank, Sequence, SequenceId, SequenceState

_Progress = int
"""Blocks that whoever is waited for must have computed; 0 stands for what forks wait for."""
_Group = dict[SequenceId, Sequence]
"""Those who wait for the same thing: all of them stand aside, or none."""


class WaitingQueue:
    """A heap with lazy deletion: a sequence that finishes while it waits is dropped when it surfaces.

    Whoever waits for somebody else to compute what both begin with stands aside: forks for their
    parent, others for their leader. They are neither seen nor in anybody's way until `release` puts
    them in their places: no step walks over them.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._num_finished = 0
        self._aside: dict[SequenceId, dict[_Progress, _Group]] = {}  # under whom they wait for
        self._awaited: dict[SequenceId, tuple[SequenceId, _Progress]] = {}  # the same for each of them

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished + len(self._awaited)

    @property
    def num_aside(self) -> int:
        """Those who stand aside; counted in the length too."""
        return len(self._awaited)

    def push(self, sequence: Sequence) -> None:
        """Put a sequence in the place that its rank says, or aside."""
        awaited = sequence.awaited
        if awaited is None:
            heappush(self._heap, (sequence.rank, sequence))
        else:
            progress = 0 if awaited is sequence.parent else sequence.num_awaited_blocks
            self._aside.setdefault(awaited.id, {}).setdefault(progress, {})[sequence.id] = sequence
            self._awaited[sequence.id] = (awaited.id, progress)

    def head(self) -> Sequence | None:
        """The first in the order, left where it is."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.state is not SequenceState.WAITING:
                heappop(self._heap)
                self._num_finished -= 1
            elif sequence.awaited is not None:  # once more: who was preempted now runs again
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

    def release(self, awaited: Sequence) -> None:
        """Let those wait in their places that this sequence no longer holds up."""
        groups = self._aside.get(awaited.id, {})
        for progress, group in list(groups.items()):
            if next(iter(group.values())).awaited is awaited:
                continue
            del groups[progress]
            for sequence in group.values():
                del self._awaited[sequence.id]
                sequence.leader = None  # found anew, should somebody lead again
            self.push_back(group.values())
        if not groups:
            self._aside.pop(awaited.id, None)

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
        place = self._awaited.pop(sequence.id, None)
        if place is None:
            return False
        awaited, progress = place
        groups = self._aside[awaited]
        del groups[progress][sequence.id]
        if not groups[progress]:
            del groups[progress]
        if not groups:
            del self._aside[awaited]
        return True

    def check_integrity(self) -> None:
        """Whoever stands aside waits for somebody who will compute what it needs.

        Raises:
            IntegrityError: naming the sequence.
        """
        aside = {
            sequence: (awaited, progress)
            for awaited, groups in self._aside.items()
            for progress, group in groups.items()
            for sequence in group.values()
        }
        if {sequence.id: place for sequence, place in aside.items()} != self._awaited:
            raise IntegrityError("those who stand aside are not those who are said to")
        for sequence, (awaited, _) in aside.items():
            if sequence.state is not SequenceState.WAITING:
                raise IntegrityError(f"sequence {sequence.id} stands aside, and waits no longer")
            if sequence.awaited is None or sequence.awaited.id != awaited:
                raise IntegrityError(f"sequence {sequence.id} stands aside for {awaited}, in vain")
