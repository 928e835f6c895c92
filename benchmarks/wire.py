"""A wire to a local server, which can be cut and mended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK = 1 << 16


class Wire:
    """Forwards a port of its own to the server's; while that is away, it refuses connections."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._ends: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._is_cut = False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """Break every connection, whatever is under way in it, and each new one until `mend`."""
        self._is_cut = True
        for end in self._ends:
            end.transport.abort()

    def mend(self) -> None:
        """Let new connections through."""
        self._is_cut = False

    async def open(self) -> None:
        """Begin to listen, on `port`."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Break every connection, and return when the last one has ended."""
        self._server.close()
        self.cut()
        await asyncio.gather(*self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            ends.add(far_writer)
            self._ends |= ends
            if not self._is_cut:
                await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        self._ends -= ends
        for end in ends:
            end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def wire_to(port: int) -> AsyncIterator[Wire]:
    """A wire for the time of a block."""
    wire = Wire(port)
    await wire.open()
    try:
        yield wire
    finally:
        await wire.close()
