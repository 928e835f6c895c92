"""The running sequences, in the order of service."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter

from tidemill_scheduler.sequence import Sequence

_by_rank = attrgetter("rank")


class RunningSequences:
    """A sorted list; ranks never change, so it stays sorted."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def last(self) -> Sequence | None:
        """The one whose turn comes last."""
        return self._sequences[-1] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_by_rank)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[bisect_left(self._sequences, sequence.rank, key=_by_rank)]

    def behind(self, sequence: Sequence) -> list[Sequence]:
        """Those whose turn comes after this one's."""
        return self._sequences[bisect_right(self._sequences, sequence.rank, key=_by_rank) :]
