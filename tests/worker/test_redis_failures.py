"""Every refusal of Redis is counted under one of a few words."""

from __future__ import annotations

import pytest
from redis import exceptions

from tidemill.errors import QueueUnavailable
from tidemill_worker.redis_failures import RedisFailure, failure_of


@pytest.mark.parametrize(
    ("cause", "failure"),
    [
        (exceptions.OutOfMemoryError("OOM"), RedisFailure.OUT_OF_MEMORY),
        (exceptions.BusyLoadingError("LOADING"), RedisFailure.LOADING),
        (exceptions.ReadOnlyError("READONLY"), RedisFailure.NOT_PRIMARY),
        (exceptions.MasterDownError("MASTERDOWN"), RedisFailure.NOT_PRIMARY),
        (exceptions.ClusterDownError("CLUSTERDOWN"), RedisFailure.NOT_PRIMARY),
        (exceptions.AuthenticationError("WRONGPASS"), RedisFailure.REFUSED),
        (exceptions.NoPermissionError("NOPERM"), RedisFailure.REFUSED),
        (exceptions.TimeoutError("late"), RedisFailure.TIMEOUT),
        (exceptions.ConnectionError("gone"), RedisFailure.UNREACHABLE),
        (exceptions.ResponseError("MISCONF"), RedisFailure.OTHER),
        (None, RedisFailure.OTHER),
    ],
)
def test_a_refusal_is_named_by_its_cause(cause: Exception | None, failure: RedisFailure) -> None:
    error = QueueUnavailable("Redis says no")
    error.__cause__ = cause
    assert failure_of(error) is failure
