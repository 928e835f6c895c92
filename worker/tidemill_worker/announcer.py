"""Tells the queue what this worker serves, and how it does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog
from redis.exceptions import RedisError

from tidemill.card import ModelCard
from tidemill.errors import QueueUnavailable
from tidemill.moves import QueueSettings
from tidemill.queue import Queue
from tidemill.registry import WorkerReport
from tidemill_worker.waiting import pauses

CARD_INTERVAL = QueueSettings().card_ttl / 3
"""Seconds between publications of the model card, which lives three times as long."""
HEARTBEAT = QueueSettings().worker_ttl / 3
"""Seconds between two reports, which live as much longer."""


class Announcer:
    """Publishes the model card and the worker's reports, through any absence of Redis.

    Args:
        card: what is served here; it does not change.
        report: how the worker does right now.
        unreachable: told of each call that Redis did not answer.
    """

    def __init__(
        self,
        queue: Queue,
        card: ModelCard,
        *,
        report: Callable[[], WorkerReport],
        unreachable: Callable[[QueueUnavailable], None],
    ) -> None:
        self._queue = queue
        self._card = card
        self._report = report
        self._unreachable = unreachable
        self._news = asyncio.Event()
        self._log = structlog.get_logger()

    def report_now(self) -> None:
        """The worker's state has changed: do not wait for the next heartbeat."""
        self._news.set()

    async def run(self) -> None:
        """Publish both until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish_card())
            group.create_task(self._send_reports())

    async def _publish_card(self) -> None:
        while True:
            await self._told(lambda: self._queue.publish_card(self._card))
            await asyncio.sleep(CARD_INTERVAL)

    async def _send_reports(self) -> None:
        while True:
            self._news.clear()
            await self._told(lambda: self._queue.report(self._report()))
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT):
                    await self._news.wait()

    async def _told(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Go on trying until Redis has heard it. What it will not hear, a worker can do without."""
        for pause in pauses():
            try:
                return await tell()
            except QueueUnavailable as error:
                self._unreachable(error)
                self._log.debug("not_announced", reason=str(error))
                await asyncio.sleep(pause)
            except RedisError as error:
                self._log.warning("not_announced", reason=str(error))
                return
