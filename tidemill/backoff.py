"""Pauses between two tries of the same thing.

They are drawn at random: else all clients that a restart has cut off at one moment would come back at one
moment too, time after time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator


def pauses(first: float, longest: float) -> Iterator[float]:
    """Seconds to wait after each failure, without end: `first`, then twice as long each time.

    That is the mean; each pause is drawn from half to one and a half times it. The mean rises up to
    `longest`.
    """
    mean = first
    while True:
        yield random.uniform(0.5 * mean, 1.5 * mean)
        mean = min(2 * mean, longest)
