"""Stopping work so that it really stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

INSISTENCE = 1.0
"""Seconds until a task that goes on is cancelled again; also what its cleaning up may take."""


async def stop(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` and return when all have ended, however they did.

    It asks again and again: on Python 3.11, `asyncio.wait_for` swallows a cancellation that comes at
    the moment in which it ends, and redis-py sends every command through it.
    """
    interrupted = False
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=INSISTENCE)
        except asyncio.CancelledError:
            interrupted = True  # these come first
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen; else asyncio complains that nobody looked
    if interrupted:
        raise asyncio.CancelledError


def run_interruptibly(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return its value; cancel it if this thread is interrupted.

    A signal handler that raises (as Celery's soft time limit does) would otherwise hit the event loop
    in the middle of some callback, which logs the exception and goes on. Here the loop has a thread of
    its own, and the exception finds the caller in a plain wait.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tidemill-work", daemon=True)
    thread.start()
    try:
        return asyncio.run_coroutine_threadsafe(work, loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(_stop_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop_all() -> None:
    await stop([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
    await asyncio.get_running_loop().shutdown_asyncgens()
