"""Which queues a server holds."""

from __future__ import annotations

import re

from tidemill.connection import connect
from tidemill.keys import QueueKeys
from tidemill.refusals import refusals_explained
from tidemill.schema import QUEUE_PATTERN

SCAN_COUNT = 10_000
"""Keys per step: a server with a million jobs is walked in a hundred of them."""


async def queue_names(url: str) -> list[str]:
    """The queues on the server that hold jobs or dead letters, or are served, in order of their names.

    Walks all keys of the server, without blocking it.

    Raises:
        ConfigurationError: `url` is not a Redis URL.
        QueueUnavailable: Redis cannot be used.
    """
    every = QueueKeys("*")
    names: set[str] = set()
    redis = connect(url, max_connections=1)
    try:
        with refusals_explained(redis):
            for key in (every.load, every.card, every.dead):
                async for found in redis.scan_iter(match=key, count=SCAN_COUNT):
                    before, after = key.split("*")
                    names.add(found.decode().removeprefix(before).removesuffix(after))
    finally:
        await redis.aclose()
    return sorted(name for name in names if re.fullmatch(QUEUE_PATTERN, name))
