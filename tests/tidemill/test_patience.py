"""Riding out an absence of Redis: how long, and that what is no absence is told at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tidemill.errors import InvalidJob, QueueUnavailable
from tidemill.patience import Patience


def failing(times: float, error: Exception) -> tuple[Callable[[], Awaitable[str]], list[float]]:
    """An operation that fails so often and then works; and when it was tried."""
    tries: list[float] = []

    async def operation() -> str:
        tries.append(asyncio.get_running_loop().time())
        if len(tries) <= times:
            raise error
        return "done"

    return operation, tries


async def test_an_operation_is_repeated_until_redis_is_back() -> None:
    operation, tries = failing(2, QueueUnavailable("away"))
    assert await Patience(10.0).ride_out(operation) == "done"
    assert len(tries) == 3


async def test_no_patience_means_one_try() -> None:
    operation, tries = failing(1, QueueUnavailable("away"))
    with pytest.raises(QueueUnavailable, match="away"):
        await Patience(0.0).ride_out(operation)
    assert len(tries) == 1


@pytest.mark.parametrize("limit", ["seconds", "until"])
async def test_the_last_try_is_made_when_patience_ends(limit: str) -> None:
    operation, tries = failing(100, QueueUnavailable("away"))
    patience = Patience(0.4 if limit == "seconds" else 60.0)
    until = asyncio.get_running_loop().time() + (0.4 if limit == "until" else 60.0)
    with pytest.raises(QueueUnavailable):
        await patience.ride_out(operation, until=until)
    assert tries[-1] - tries[0] >= 0.39
    assert 3 <= len(tries) <= 9  # the shortest pauses: 0.05, 0.1 and 0.2 s; the longest: 0.15 and 0.3 s


async def test_patience_begins_anew_with_each_operation() -> None:
    patience = Patience(0.3)
    for _ in range(3):
        operation, _ = failing(1, QueueUnavailable("away"))
        assert await patience.ride_out(operation) == "done"


async def test_an_error_of_another_kind_is_told_at_once() -> None:
    operation, tries = failing(1, InvalidJob("wrong"))
    with pytest.raises(InvalidJob):
        await Patience(10.0).ride_out(operation)
    assert len(tries) == 1
