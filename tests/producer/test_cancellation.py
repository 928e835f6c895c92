from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from tidemill_producer.cancellation import run_interruptibly, stop


class TimeIsUp(Exception):
    """As a signal handler raises it."""


async def forever() -> None:
    await asyncio.Event().wait()


async def tidy(cleaned: list[bool]) -> None:
    """Takes some turns of the loop to clean up."""
    try:
        await forever()
    finally:
        for _ in range(5):
            await asyncio.sleep(0)
        cleaned.append(True)


async def fragile() -> None:
    """Fails while it is being stopped."""
    try:
        await forever()
    finally:
        raise ValueError("no way to end")


async def started(*works: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(work) for work in works]
    await asyncio.sleep(0)
    return tasks


async def test_stopped_tasks_have_cleaned_up_and_ended() -> None:
    cleaned: list[bool] = []
    tasks = await started(tidy(cleaned), forever(), fragile())

    await stop(tasks)

    assert cleaned == [True]
    assert [task.cancelled() for task in tasks] == [True, True, False]


async def test_a_stop_that_is_cancelled_itself_stops_all_the_same() -> None:
    tasks = await started(deaf())
    stopping = asyncio.create_task(stop(tasks))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stopping.cancel()

    with pytest.raises(asyncio.CancelledError):
        await stopping

    assert tasks[0].cancelled()


async def deaf() -> None:
    """Its cleaning up would not end by itself."""
    with suppress(asyncio.CancelledError):
        await forever()
    await forever()


def test_the_value_and_the_error_of_work_come_back() -> None:
    async def value() -> int:
        return 7

    async def error() -> int:
        raise ValueError("stuck")

    assert run_interruptibly(value()) == 7
    with pytest.raises(ValueError, match="stuck"):
        run_interruptibly(error())


def test_an_interrupted_thread_cancels_its_work_and_lets_it_clean_up() -> None:
    """Given work in progress, when a signal handler raises in this thread, then the work is told."""
    cleaned: list[bool] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            cleaned.append(True)
            raise

    def strike(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        with pytest.raises(TimeIsUp):
            run_interruptibly(work())
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert cleaned == [True]
