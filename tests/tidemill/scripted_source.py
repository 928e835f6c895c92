"""Answers under the control of a test: for those who wait, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.tidemill.factories import make_result
from tidemill.errors import JobUnknown
from tidemill.inbox import Inbox
from tidemill.jobs import JobId, Result
from tidemill.patience import Patience


class ScriptedSource:
    """A result stream, hashes and a server that can be away."""

    def __init__(self) -> None:
        self.entries: list[Result] = []
        self.hashes: dict[str, Result | None] = {}
        self.failure: Exception | None = None
        self.calls: list[str] = []

    def answer(self, job_id: str, *, stream: bool = True) -> Result:
        """Record a result, in the client's own stream or in another one."""
        self.hashes[job_id] = result = make_result(job_id)
        if stream:
            self.entries.append(result)
        return result

    async def tail(self) -> str:
        self._serve("tail")
        await asyncio.sleep(0)
        return str(len(self.entries))

    async def read(self, cursor: str, *, count: int, block: float) -> Sequence[tuple[str, Result]]:
        self._serve("read")
        await asyncio.sleep(block)
        first = int(cursor)
        return [(str(first + n + 1), result) for n, result in enumerate(self.entries[first : first + count])]

    async def look(self, job_ids: Sequence[JobId]) -> Sequence[Result | JobUnknown | None]:
        self._serve("look")
        await asyncio.sleep(0)
        return [self.hashes[i] if i in self.hashes else JobUnknown(f"job {i} is unknown") for i in job_ids]

    def _serve(self, call: str) -> None:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure


@asynccontextmanager
async def make_inbox(source: ScriptedSource, *, patience: float = 5.0) -> AsyncIterator[Inbox]:
    inbox = Inbox(source, patience=Patience(patience), poll=0.002)
    try:
        yield inbox
    finally:
        await inbox.close()
