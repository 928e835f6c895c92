"""Waits that are given up leave nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from tests.worker.factories import eventually
from tidemill_worker.waiting import unless


async def test_a_wait_that_is_cancelled_has_ended() -> None:
    """Nothing goes on behind the back of whoever has cancelled it, such as a read of a connection."""
    moments: list[str] = []

    async def wait() -> None:
        moments.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            moments.append("ended")

    before = asyncio.all_tasks()
    waiting = asyncio.create_task(unless(asyncio.Event(), wait()))
    await eventually(lambda: moments)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert moments == ["begun", "ended"]
    assert asyncio.all_tasks() == before


async def test_a_wait_that_fails_says_so_unless_it_was_given_up() -> None:
    stopping = asyncio.Event()

    async def fail() -> None:
        raise OSError

    with pytest.raises(OSError):
        await unless(stopping, fail())
    stopping.set()
    await unless(stopping, asyncio.Event().wait())
    await unless(asyncio.Event(), asyncio.Event().wait(), timeout=0.01)
