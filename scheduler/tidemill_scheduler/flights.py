"""The plans that were made and have not returned yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tidemill_scheduler.plan import StepPlan
from tidemill_scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan in flight, the sequence of each of its rows and of each block copy."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    forks: tuple[Sequence, ...] = ()


class Flights:
    """All of them, the oldest first; they return in this order."""

    def __init__(self) -> None:
        self.next_step = 0
        """Number of the next plan that is launched."""
        self._flights: deque[Flight] = deque()

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def newest_step(self) -> int | None:
        """The last step in flight, if any is."""
        return self._flights[-1].plan.step_id if self._flights else None

    def launch(self, flight: Flight) -> None:
        """Send off the plan of `next_step`; an empty one does not fly."""
        if not flight.plan.is_empty:
            self._flights.append(flight)
            self.next_step += 1

    def land(self, step_id: int) -> Flight:
        """Take back the oldest.

        Raises:
            ValueError: if it is not this plan's turn.
        """
        if not self._flights or self._flights[0].plan.step_id != step_id:
            due = self._flights[0].plan.step_id if self._flights else "none"
            raise ValueError(f"step {step_id} returned, the oldest in flight is {due}")
        return self._flights.popleft()
