"""How the worker's tasks wait: between tries, and for something that a stop makes pointless."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

from tidemill import backoff

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.5


def pauses() -> Iterator[float]:
    """Seconds to wait between two tries of Redis, without end."""
    return backoff.pauses(FIRST_PAUSE, LONGEST_PAUSE)


async def unless(stopping: asyncio.Event, waiting: Awaitable[Any], *, timeout: float | None = None) -> None:
    """Wait for something that may be abandoned halfway, and no longer than until `stopping` is set."""
    work = asyncio.ensure_future(waiting)
    tasks = {work, asyncio.ensure_future(stopping.wait())}
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if work in done:
        work.result()
