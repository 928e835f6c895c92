"""The Lua scripts: put together from `lua/`, and run by digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from tidemill.keys import lua_names

LOADS = 3
"""Tries to load a script before giving up on a server that is being flushed again and again."""

LIBRARIES = ("_jobs", "_service", "_lanes", "_answers", "_memory", "_leases")


class Move(StrEnum):
    """Scripts by file name."""

    SUBMIT = "submit"
    CLAIM = "claim"
    RENEW = "renew"
    FINISH = "finish"
    RELEASE = "release"
    RECLAIM = "reclaim"
    BEGIN = "begin"
    CANCEL = "cancel"
    EXPIRE = "expire"
    DEPTH = "depth"
    HEARTBEAT = "heartbeat"
    WORKERS = "workers"
    REMOVE_CONSUMER = "remove_consumer"


def _shebang(move: Move) -> str:
    """Only submit is refused by a full server; all else frees memory, or is on the way to it."""
    if move is Move.SUBMIT:
        return "#!lua\n"
    reads = move in (Move.DEPTH, Move.WORKERS)
    return f"#!lua flags={'no-writes' if reads else 'allow-oom'}\n"


@dataclass(frozen=True, slots=True)
class Script:
    """One move, ready to be sent."""

    source: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "digest", digest)

    async def run(self, redis: Redis, prefix: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Run the script once per list of arguments, in order, all in one round trip.

        A server that does not have the script (any more) is given it, and asked again for what
        it could not do.
        """
        replies: list[Any] = [None] * len(calls)
        missing = list(range(len(calls)))
        for _ in range(LOADS):
            pipeline = redis.pipeline(transaction=False)
            for index in missing:
                pipeline.evalsha(self.digest, 1, prefix, *calls[index])
            for index, reply in zip(missing, await pipeline.execute(raise_on_error=False), strict=True):
                replies[index] = reply
            missing = [index for index in missing if isinstance(replies[index], NoScriptError)]
            if not missing:
                break
            await redis.script_load(self.source)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies


def load_scripts() -> dict[Move, Script]:
    """Read all scripts from the package."""
    folder = files("tidemill") / "lua"
    shared = lua_names() + "".join((folder / f"{name}.lua").read_text() for name in LIBRARIES)
    return {move: Script(_shebang(move) + shared + (folder / f"{move}.lua").read_text()) for move in Move}
