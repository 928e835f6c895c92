"""Stopping work so that it really stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def stop(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` and return when all have ended, however they did.

    Whoever stops them may be cancelled too: the tasks are told once more, and still come first.
    """
    interrupted = False
    for task in tasks:
        task.cancel()
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            interrupted = True
            for task in running:
                task.cancel()
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
