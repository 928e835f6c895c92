"""The dead letters of a queue: jobs that were given up, kept for somebody to look at."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tidemill import wire
from tidemill.jobs import Job
from tidemill.link import Link
from tidemill.moves import DeadLetter

ENTRY_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")
"""Redis's ids end where 64 bits do, a little beyond this; more digits are the id of a job, or nonsense."""

PAGE = 10
"""Letters read at a time when one is looked for; each may carry as much as a job may."""


class DeadLetters:
    """The stream of them. All methods raise `QueueUnavailable`."""

    def __init__(self, link: Link, key: str) -> None:
        self._link = link
        self._key = key

    async def after(self, cursor: str, count: int) -> list[DeadLetter]:
        """Read on behind the entry `cursor`, oldest first."""
        entries = await self._link.read(self._key, cursor, count, 0.0)
        return [wire.dead_letter(entry, fields) for entry, fields in entries]

    async def find(self, name: str) -> DeadLetter | None:
        """Look one up by its entry, or else the newest of the job of that id."""
        if ENTRY_ID.fullmatch(name):
            async with self._link.reachable():
                found: Any = await self._link.redis.xrange(self._key, name, name)
            for entry, fields in found:
                return wire.dead_letter(entry.decode(), fields)
        async for letter in self._newest_first():
            if letter.job_id == name:
                return letter
        return None

    async def _newest_first(self) -> AsyncIterator[DeadLetter]:
        upto = "+"
        while True:
            async with self._link.reachable():
                found: Any = await self._link.redis.xrevrange(self._key, upto, count=PAGE)
            for entry, fields in found:
                yield wire.dead_letter(entry.decode(), fields)
            if len(found) < PAGE:
                return
            upto = f"({found[-1][0].decode()}"

    async def purge(self, entry_ids: Sequence[str] | None) -> int:
        """Remove those of these entries that are there, or all of them; returns how many that were.

        Raises:
            ValueError: naming what is not the id of an entry; nothing was removed.
        """
        wrong = next((entry for entry in entry_ids or () if not ENTRY_ID.fullmatch(entry)), None)
        if wrong is not None:
            raise ValueError(f"entry_ids: {wrong!r} is not the id of an entry, which is <number>-<number>")
        if entry_ids is not None and not entry_ids:
            return 0
        async with self._link.reachable():
            if entry_ids is None:
                return int(await self._link.redis.xtrim(self._key, maxlen=0, approximate=False))
            return int(await self._link.redis.xdel(self._key, *entry_ids))


def requeued(letter: DeadLetter) -> Job:
    """Make the job anew, with `requeued_from` in its metadata; its id follows from the letter.

    Raises:
        InvalidJob: the payload is not a job, or has no room for one more metadata entry.
    """
    job = Job.from_wire(letter.payload)
    origin = f"{letter.job_id}/{letter.entry_id}".encode()
    new_id = hashlib.blake2b(origin, digest_size=16).hexdigest()
    metadata = {**job.metadata, "requeued_from": letter.job_id}
    return Job.parse({**job.model_dump(), "id": new_id, "metadata": metadata})
