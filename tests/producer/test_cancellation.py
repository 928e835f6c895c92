from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from tidemill_producer.cancellation import run_interruptibly, stop


class TimeIsUp(Exception):
    """As a signal handler raises it."""


async def forever() -> None:
    await asyncio.Event().wait()


async def deaf() -> None:
    """Loses its first cancellation, as `asyncio.wait_for` does at a bad moment."""
    with suppress(asyncio.CancelledError):
        await forever()
    await forever()


async def test_stopped_tasks_have_ended_even_if_they_did_not_hear_at_first() -> None:
    tasks = [asyncio.create_task(work()) for work in (deaf, forever)]
    await asyncio.sleep(0)

    await stop(tasks)

    assert all(task.cancelled() for task in tasks)


async def test_a_stop_that_is_cancelled_itself_stops_all_the_same() -> None:
    tasks = [asyncio.create_task(deaf())]
    await asyncio.sleep(0)
    stopping = asyncio.create_task(stop(tasks))
    await asyncio.sleep(0)
    stopping.cancel()

    with pytest.raises(asyncio.CancelledError):
        await stopping

    assert tasks[0].cancelled()


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
