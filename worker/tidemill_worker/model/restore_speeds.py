"""What it costs to restore a preempted sequence, measured on the plans that are executed anyway."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from tidemill_scheduler.costs import RestoreCosts
from tidemill_scheduler.plan import Row
from tidemill_worker.model.lap import Lap

DECAY = 0.9
"""What earlier measurements still weigh after one more: half of it is forgotten after seven."""
PREFILL_SHARE = 0.75
"""Of a step's tokens, in rows of several: the few others then change the quotient by a quarter at most,
unless they cost more than twice as much."""
LEAST_BLOCKS = 4
"""A copy of fewer tells more about calls than about memory."""


@dataclass
class Rate:
    """Seconds for each unit of some work. Larger measurements weigh more, later ones too."""

    default: float
    """Seconds for one unit, until something has been measured."""
    _seconds: float = 0.0
    _units: float = 0.0

    def add(self, units: int, seconds: float) -> None:
        """So long did so much take."""
        self._seconds = DECAY * self._seconds + seconds
        self._units = DECAY * self._units + units

    @property
    def seconds_per_unit(self) -> float:
        return self._seconds / self._units if self._units else self.default


class RestoreSpeeds:
    """The speeds of prefill and of copies between device and swap space, as exponentially weighted means.

    Laps may become known later than they end, so that nothing waits for the device; they are collected,
    in their order, whenever the next one ends or the costs are asked for.
    """

    def __init__(self, start_lap: Callable[[], Lap]) -> None:
        self._start_lap = start_lap
        self._least_tokens = math.inf
        self._forget()

    @property
    def costs(self) -> RestoreCosts:
        """As far as measured; `RestoreCosts`'s own values before that."""
        self._collect()
        return RestoreCosts(self._tokens.seconds_per_unit, self._blocks.seconds_per_unit)

    def calibrate(self, num_tokens: int) -> None:
        """Forget all measurements; the next is of a prefill chunk of `num_tokens` tokens.

        From now on, steps of at least half as many prompt tokens are measured too. Smaller ones say
        little: reading the weights costs the same for one token as for many.
        """
        self._least_tokens = num_tokens / 2
        self._forget()

    def computing(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """Around the forward pass of these rows: time it, if it tells how fast prompts are computed."""
        num_tokens = sum(row.count for row in rows)
        prefill = sum(row.count for row in rows if row.count > 1)
        if prefill < self._least_tokens or prefill < PREFILL_SHARE * num_tokens:
            return nullcontext()
        return self._timing(self._tokens, num_tokens)

    def copying(self, num_blocks: int) -> AbstractContextManager[None]:
        """Around a copy of so many blocks, either way: time it, if they are not too few."""
        if num_blocks < LEAST_BLOCKS:
            return nullcontext()
        return self._timing(self._blocks, num_blocks)

    @contextmanager
    def _timing(self, rate: Rate, units: int) -> Iterator[None]:
        lap = self._start_lap()
        yield
        lap.stop()
        self._pending.append((rate, units, lap))
        self._collect()

    def _collect(self) -> None:
        while self._pending:
            rate, units, lap = self._pending[0]
            if (seconds := lap.seconds) is None:
                return
            rate.add(units, seconds)
            self._pending.popleft()

    def _forget(self) -> None:
        defaults = RestoreCosts()
        self._tokens = Rate(defaults.seconds_per_token)
        self._blocks = Rate(defaults.seconds_per_block)
        self._pending: deque[tuple[Rate, int, Lap]] = deque()
