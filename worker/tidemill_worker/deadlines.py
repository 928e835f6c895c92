"""The requests in the engine that have a deadline, earliest first, however many they are."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class Deadlines:
    """A heap with lazy deletion: a request that ends in time is dropped when it surfaces.

    To add one costs O(log n); to look, when none is due, O(1).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._deadlines: dict[str, float] = {}

    def add(self, request_id: str, deadline: float) -> None:
        """Watch a request, which is not among them yet."""
        self._deadlines[request_id] = deadline
        heappush(self._heap, (deadline, request_id))

    def discard(self, request_id: str) -> None:
        """Watch a request no longer, if it was watched.

        The heap is rebuilt when most of it is of no use, so that memory follows the number watched.
        """
        if self._deadlines.pop(request_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._deadlines):
            self._heap = [(deadline, watched) for watched, deadline in self._deadlines.items()]
            heapify(self._heap)

    def pop_due(self, now: float) -> list[str]:
        """Take out those whose deadline is `now` or before, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heappop(self._heap)
            if self._deadlines.get(request_id) == deadline:
                del self._deadlines[request_id]
                due.append(request_id)
        return due
