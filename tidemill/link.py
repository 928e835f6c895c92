"""One queue's line to its server: runs moves, reads streams, and remembers outages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ReadOnlyError, RedisError

from tidemill import wire
from tidemill.connection import MAX_BLOCK, OUTAGES, blocking_twin, unavailable
from tidemill.moves import QueueSettings
from tidemill.scripts import Move, load_scripts


class Link:
    """Everything between `Queue` and Redis. All methods raise `QueueUnavailable`."""

    def __init__(
        self, redis: Redis, prefix: str, settings: QueueSettings, clock: Callable[[], float]
    ) -> None:
        self.redis = redis
        self._blocking = blocking_twin(redis)
        self._prefix = prefix
        self._scripts = load_scripts()
        self._settings_json = json.dumps(wire.script_settings(settings))
        self._lease = settings.lease
        self._clock = clock
        self._outage = False
        self._restored_at: float | None = None

    async def aclose(self) -> None:
        """Close the connections for blocking reads; the client for commands is its owner's."""
        await self._blocking.aclose()

    async def run(self, move: Move, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Make one move per list of arguments, in order, all in one round trip."""
        if not calls:
            return []
        arguments = [[self._settings_json, *call] for call in calls]
        began = self._clock()
        async with self.reachable():
            replies = await self._scripts[move].run(self.redis, self._prefix, arguments)
        if self._clock() - began > self._lease:
            self._restored_at = self._clock()  # a stall this long is an outage too
        return replies

    async def one(self, move: Move, *arguments: Any) -> Any:
        """Make one move."""
        return (await self.run(move, [arguments]))[0]

    async def text(self, move: Move, *arguments: Any) -> str:
        """Make one move that answers in a word."""
        reply: bytes = await self.one(move, *arguments)
        return reply.decode()

    async def read(self, key: str, cursor: str, count: int, block: float) -> wire.Entries:
        """Read a stream after `cursor`, waiting up to `block` seconds for the first entry."""
        milliseconds = int(min(block, MAX_BLOCK) * 1000)
        async with self.reachable():
            if milliseconds > 0:
                reply = await self._blocking.xread({key: cursor}, count, block=milliseconds)
            else:
                reply = await self.redis.xread({key: cursor}, count)
        return wire.entries(reply)

    @asynccontextmanager
    async def reachable(self) -> AsyncIterator[None]:
        """Translate Redis's refusals, and remember when it came back from an outage."""
        try:
            yield
        except RedisError as error:
            if isinstance(error, OUTAGES):
                self._outage = True
            if isinstance(error, ReadOnlyError):
                # The address may lead to another primary by now; these connections never will.
                await self.redis.connection_pool.disconnect(inuse_connections=False)
            reason = unavailable(error, self.redis)
            if reason is None:
                raise
            raise reason from error
        if self._outage:
            self._outage = False
            self._restored_at = self._clock()

    async def lately_restored(self) -> bool:
        """Whether the last outage ended less than one lease ago."""
        if self._outage:
            await self.ping()
        restored_at = self._restored_at
        return restored_at is not None and self._clock() - restored_at < self._lease

    async def ping(self) -> None:
        """Return if Redis answers."""
        async with self.reachable():
            await self.redis.ping()
