"""One queue's line to its server: runs moves, reads streams, and remembers outages."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from tidemill import wire
from tidemill.connection import MAX_BLOCK, blocking_twin
from tidemill.errors import QueueUnavailable
from tidemill.moves import QueueSettings
from tidemill.refusals import is_out_of_memory, refusals_explained
from tidemill.scripts import Move, load_scripts


class Link:
    """Everything between `Queue` and Redis. All methods raise `QueueUnavailable`."""

    def __init__(
        self, redis: Redis, prefix: str, settings: QueueSettings, clock: Callable[[], float]
    ) -> None:
        self.redis = redis
        self._blocking = blocking_twin(redis)
        self._turns = asyncio.Semaphore(self._blocking.connection_pool.max_connections)
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
        """Read a stream after `cursor`, waiting up to `block` seconds for the first entry.

        More readers than there may be blocking reads at once wait for their turn meanwhile, and look
        before and after it: they cost no more connections, and none of them waits longer.
        """
        wait = min(block, MAX_BLOCK)
        async with self.reachable():
            if wait <= 0 or self._turns.locked():
                reply = await self.redis.xread({key: cursor}, count)
                if reply or wait <= 0:
                    return wire.entries(reply)
            left = await self._turn(wait)
            if left <= 0:
                return wire.entries(await self.redis.xread({key: cursor}, count))
            try:
                reply = await self._blocking.xread({key: cursor}, count, block=math.ceil(left * 1000))
            finally:
                self._turns.release()
        return wire.entries(reply)

    async def _turn(self, wait: float) -> float:
        """Wait for a turn to block; the seconds that are left for it, or 0 if it did not come."""
        clock = asyncio.get_running_loop().time
        give_up = clock() + wait
        try:
            async with asyncio.timeout_at(give_up):
                await self._turns.acquire()
        except TimeoutError:
            return 0.0
        return max(0.001, give_up - clock())

    @asynccontextmanager
    async def reachable(self) -> AsyncIterator[None]:
        """Translate Redis's refusals, and remember when it came back from an outage."""
        try:
            with refusals_explained(self.redis, self._blocking):
                yield
        except QueueUnavailable as refusal:
            # Whoever refuses one refuses renewals too, except a full server, which takes them.
            if not is_out_of_memory(refusal):
                self._outage = True
            raise
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
