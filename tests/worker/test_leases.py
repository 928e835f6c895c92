"""The lease keeper where Redis plays no part: how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from tests.worker.factories import make_held
from tidemill.moves import Renewal, RenewOutcome
from tidemill_worker.held import HeldJobs
from tidemill_worker.leases import LeaseKeeper


class SilentQueue:
    """Takes a renewal and never answers."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.closed = False

    async def renew(self, worker: str, renewals: Sequence[Renewal]) -> RenewOutcome:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody wakes it")


def make_keeper(queue: SilentQueue, failures: list[str]) -> LeaseKeeper:
    @asynccontextmanager
    async def open_queue() -> AsyncIterator[SilentQueue]:
        try:
            yield queue
        finally:
            queue.closed = True

    held = HeldJobs()
    held.hold(make_held())
    return LeaseKeeper(
        open_queue,  # type: ignore[arg-type]
        held,
        worker="w1",
        interval=0.01,
        stream_interval=0.01,
        on_lost=failures.append,
        on_cancelled=failures.append,
        on_failure=lambda: failures.append("failed"),
    )


def test_a_renewal_without_an_answer_does_not_hold_up_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs must not make a stopping worker hang (bullmq#2430)."""
    monkeypatch.setattr("tidemill_worker.leases.JOIN_TIMEOUT", 0.05)
    queue, failures = SilentQueue(), []
    keeper = make_keeper(queue, failures)
    with capture_logs() as logs:
        keeper.start()
        assert queue.asked.wait(10)
        keeper.stop()
    assert queue.closed
    assert failures == []
    assert [entry["event"] for entry in logs] == ["renewal_abandoned"]
    keeper.stop()  # harmless
