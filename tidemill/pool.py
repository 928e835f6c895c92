"""Connections shared by whoever sends commands."""

from __future__ import annotations

import asyncio
import builtins
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import TimeoutError


class Pool(ConnectionPool):
    """So many connections; more commands wait their turn, in the order in which they came.

    redis-py's own blocking pool waits on a condition, and on Python 3.11 a waiter that is cancelled
    after it was woken takes the turn with it: seen, others waited for ever beside free connections.
    """

    def __init__(self, *, max_connections: int, timeout: float, **options: Any) -> None:
        """`timeout` is how many seconds a command waits for its turn."""
        super().__init__(max_connections=max_connections, **options)
        self._turns = asyncio.Semaphore(max_connections)
        self._timeout = timeout
        self._distrusted: set[AbstractConnection] = set()

    def __repr__(self) -> str:
        """Without the options: among them are passwords, which not every redis-py leaves out."""
        return f"<{type(self).__name__} of {self.max_connections} {self.connection_class.__name__}>"

    def distrust(self) -> None:
        """No connection that exists now is used again: it may lead to what is the wrong server by now."""
        self._distrusted.update(self._available_connections, self._in_use_connections)

    async def get_connection(
        self, command_name: str | None = None, *keys: Any, **options: Any
    ) -> AbstractConnection:
        """Wait for a connection that works.

        Raises:
            TimeoutError: all have been busy all the time.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self._turns.acquire()
        except builtins.TimeoutError:
            busy = f"all {self.max_connections} connections have been busy for {self._timeout:g} s"
            raise TimeoutError(busy) from None
        connection: AbstractConnection = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            if connection in self._distrusted:
                self._distrusted.discard(connection)
                await connection.disconnect(nowait=True)
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        """Give a connection back, to whoever is next."""
        try:
            await super().release(connection)
        finally:
            self._turns.release()
