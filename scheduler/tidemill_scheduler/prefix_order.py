"""Where a sequence stands among those that begin alike: next to them."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill_scheduler.sequence import PrefixPlace, Sequence

_Beginning = int
"""Hash of the first blocks of a prompt. A collision would only move somebody in the line."""


class PrefixOrder:
    """Orders prompts as the leaves of a tree of common beginnings, the earliest arrived branch first.

    Beginnings of 1, 2, 4, 8 and so on blocks are told apart. Of each one, from the shortest on, the place
    says when the first sequence that has it arrived, and at last when this one did. Compared with each
    other, such places put prompts together that have much in common. A beginning is known while a
    sequence that has it is unfinished.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._arrivals: dict[_Beginning, int] = {}
        self._num_members: dict[_Beginning, int] = {}

    def enter(self, sequence: Sequence) -> PrefixPlace:
        """Take in a sequence whose `arrival` and `chain_root` are set; return its place.

        A fork stands next to its parent, and is no member of its own.
        """
        if sequence.parent is not None:
            return (*sequence.parent.rank[-1][:-1], sequence.arrival)
        place = []
        for beginning in self._beginnings(sequence):
            place.append(self._arrivals.setdefault(beginning, sequence.arrival))
            self._num_members[beginning] = self._num_members.get(beginning, 0) + 1
        return (*place, sequence.arrival)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has finished."""
        if sequence.parent is not None:
            return
        for beginning in self._beginnings(sequence):
            self._num_members[beginning] -= 1
            if not self._num_members[beginning]:
                del self._num_members[beginning], self._arrivals[beginning]

    def _beginnings(self, sequence: Sequence) -> Iterator[_Beginning]:
        num_tokens = self._block_size
        while num_tokens < sequence.num_prompt_tokens:
            yield hash((sequence.chain_root, *sequence.token_ids[:num_tokens]))
            num_tokens *= 2
