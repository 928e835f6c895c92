"""Commands that are no move of a job, and so are sent to Redis directly, fail like the moves do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tidemill.connection import unavailable


@contextmanager
def refusals_explained(redis: Redis) -> Iterator[None]:
    """Turn what Redis or the network says inside the block into `QueueUnavailable`.

    Errors that mean a fault of ours pass unchanged.
    """
    try:
        yield
    except RedisError as error:
        explained = unavailable(error, redis)
        if explained is None:
            raise
        raise explained from error
