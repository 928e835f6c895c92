"""Waiting for what another process does: look, look again, and give up at a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

INTERVAL = 0.02


async def until(condition: Callable[[], object | Awaitable[object]], *, timeout: float = 30.0) -> None:
    """Return once `condition`, which may be a coroutine function, holds.

    Raises:
        TimeoutError: it still does not after `timeout` seconds.
    """
    async with asyncio.timeout(timeout):
        while True:
            holds = condition()
            if inspect.isawaitable(holds):
                holds = await holds
            if holds:
                return
            await asyncio.sleep(INTERVAL)
