"""A wire to a server that can be cut, be slow, or lose what goes over it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from tests.tidemill.resp import Messages, words_of

CHUNK = 65536


@dataclass(eq=False)
class Fault:
    """One accident that waits for its command."""

    words: tuple[bytes, ...]
    """The first words of the command, in capitals."""
    nth: int
    """How many such commands there are yet to come, this one included."""
    silent: bool
    """Whether the connection then stays open, and nothing comes over it any more."""
    spares_command: bool
    """Whether the command still takes effect, and only its reply is lost."""
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def meets(self, words: list[bytes]) -> bool:
        """Whether this command is the one."""
        if tuple(word.upper() for word in words[: len(self.words)]) != self.words:
            return False
        self.nth -= 1
        return self.nth == 0


class Proxy:
    """Forwards one local port to a server, whole commands and whole replies at a time."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._connections: set[_Connection] = set()
        self._faults: list[Fault] = []
        self._cut = False
        self.losing = False
        self.flowing = asyncio.Event()
        """Cleared while replies are held back."""
        self.flowing.set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self.mend()
        await self.refuse()

    async def refuse(self) -> None:
        """Break every connection; nobody listens any more, until `start`."""
        self._server.close()
        self.hang_up()
        await self._server.wait_closed()

    def hang_up(self) -> None:
        """Break every connection; new ones are served."""
        for connection in self._connections:
            connection.abort()

    def cut(self) -> None:
        """Break every connection, and each new one too."""
        self._cut = True
        self.hang_up()

    def mend(self) -> None:
        """Forward everything again; accidents that have not happened yet will not happen."""
        self._cut = self.losing = False
        self._faults.clear()
        self.flowing.set()

    def lose_replies(self) -> None:
        """Let commands through; where the reply would come, the connection breaks."""
        self.losing = True

    def hold_replies(self) -> None:
        """Let commands through and keep all replies back, in order, until `mend`."""
        self.flowing.clear()

    def lose_reply(self, *words: str, nth: int = 1, silent: bool = False) -> asyncio.Event:
        """Lose one reply: that to the `nth` command from now on that begins with these words.

        The command takes effect. Then its connection breaks or, if `silent`, stays open, and no reply
        comes over it any more. `lose_reply("EVALSHA", digest)` matches one script. The event is set
        when it has happened: at that moment the server has carried the command out.
        """
        return self._arm(Fault(_capitals(words), nth, silent, spares_command=True))

    def lose_command(self, *words: str, nth: int = 1, silent: bool = False) -> asyncio.Event:
        """The same one step earlier: the command never reaches the server."""
        return self._arm(Fault(_capitals(words), nth, silent, spares_command=False))

    def _arm(self, fault: Fault) -> asyncio.Event:
        self._faults.append(fault)
        return fault.happened

    def fault_for(self, command: bytes) -> Fault | None:
        """Take out the first accident that waits for this command; there is one at most for each."""
        words = words_of(command) if self._faults else []
        met = next((fault for fault in self._faults if fault.meets(words)), None)
        if met is not None:
            self._faults.remove(met)
        return met

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, reader, writer)
        self._connections.add(connection)
        try:
            if self._cut:
                connection.abort()
            else:
                await connection.forward(self._target)
        finally:
            self._connections.discard(connection)


class _Connection:
    """One client's connection, and the one to the server behind it."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._in_flight: deque[Fault | None] = deque()
        """What is to happen to the replies to come."""
        self._silent = False

    def abort(self) -> None:
        self._writer.transport.abort()

    async def forward(self, target: int) -> None:
        """Carry both directions until either side ends."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            self.abort()
            return
        await asyncio.gather(self._carry_commands(writer), self._carry_replies(reader))

    async def _carry_commands(self, server: asyncio.StreamWriter) -> None:
        messages = Messages()
        with suppress(ConnectionError):
            while data := await self._reader.read(CHUNK):
                for command in messages.feed(data):
                    self._take_command(command, server)
                await server.drain()
        server.close()

    def _take_command(self, command: bytes, server: asyncio.StreamWriter) -> None:
        fault = self._proxy.fault_for(command)
        if fault is not None and not fault.spares_command:
            self._meet(fault)
        if not (self._silent or self._writer.transport.is_closing()):
            self._in_flight.append(fault)
            server.write(command)

    async def _carry_replies(self, server: asyncio.StreamReader) -> None:
        messages = Messages()
        with suppress(ConnectionError):
            while data := await server.read(CHUNK):
                for reply in messages.feed(data):
                    await self._take_reply(reply)
                await self._writer.drain()
        self._writer.close()

    async def _take_reply(self, reply: bytes) -> None:
        fault = self._in_flight.popleft() if self._in_flight else None
        if fault is not None:
            self._meet(fault)
        await self._proxy.flowing.wait()
        if self._proxy.losing:
            self.abort()
        if not (self._silent or self._writer.transport.is_closing()):
            self._writer.write(reply)

    def _meet(self, fault: Fault) -> None:
        """Let the accident happen."""
        fault.happened.set()
        if fault.silent:
            self._silent = True
        else:
            self.abort()


def _capitals(words: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(word.upper().encode() for word in words)


@asynccontextmanager
async def proxy_to(port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
