"""Riding out an absence of Redis."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tidemill.backoff import pauses
from tidemill.errors import QueueUnavailable

T = TypeVar("T")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
"""Seconds between two tries while Redis is away."""


class Patience:
    """Repeats what Redis was away for, until it is back or has been away for too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def ride_out(self, operation: Callable[[], Awaitable[T]], *, until: float = math.inf) -> T:
        """What `operation` returns, at the first try after which Redis is there.

        Args:
            operation: may be repeated after it has raised `QueueUnavailable`.
            until: the event loop's time at which patience ends in any case.

        Raises:
            QueueUnavailable: Redis was still away when patience ended.
        """
        clock = asyncio.get_running_loop().time
        give_up: float | None = None
        for pause in pauses(FIRST_PAUSE, LONGEST_PAUSE):
            try:
                return await operation()
            except QueueUnavailable:
                give_up = min(clock() + self._seconds, until) if give_up is None else give_up
                if clock() >= give_up:
                    raise
            await asyncio.sleep(min(pause, give_up - clock()))
        raise AssertionError("unreachable: the pauses never end")
