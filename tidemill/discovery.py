"""Which queues a server holds."""

from __future__ import annotations

import re

from redis.asyncio import Redis

from tidemill.connection import connect, each_primary
from tidemill.keys import QueueKeys
from tidemill.refusals import refusals_explained
from tidemill.schema import QUEUE_PATTERN

SCAN_COUNT = 10_000
"""Keys per step: a server with a million jobs is walked in a hundred of them."""


async def queue_names(url: str) -> list[str]:
    """The queues on the server that hold jobs or dead letters, or are served, in order of their names.

    Walks all keys of the server, or of every primary of a cluster, without blocking it.

    Raises:
        ConfigurationError: `url` is not a Redis URL.
        QueueUnavailable: Redis cannot be used.
    """
    names: set[str] = set()
    async with connect(url, max_connections=1) as redis:
        with refusals_explained(redis):
            for primary in await each_primary(redis):
                async with primary:
                    names |= await _names_on(primary)
    return sorted(names)


async def _names_on(redis: Redis) -> set[str]:
    every = QueueKeys("*")
    names: set[str] = set()
    for key in (every.load, every.card, every.workers, every.dead):
        before, after = key.split("*")
        async for found in redis.scan_iter(match=key, count=SCAN_COUNT):
            names.add(found.decode().removeprefix(before).removesuffix(after))
    return {name for name in names if re.fullmatch(QUEUE_PATTERN, name)}
