"""The lease keeper where Redis plays no part: how it ends, and what it makes of what it is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.worker.factories import eventually, make_held
from tidemill.jobs import JobId
from tidemill.moves import Renewal, RenewOutcome
from tidemill_worker.held import HeldJob, HeldJobs
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


@dataclass
class ScriptedQueue:
    """Tells of a cancellation once, and counts what it is asked."""

    cancelled: set[JobId]
    renewed: list[list[str]] = field(default_factory=list)
    closed: bool = False

    async def renew(self, worker: str, renewals: Sequence[Renewal]) -> RenewOutcome:
        self.renewed.append([renewal.job_id for renewal in renewals])
        cancelled, self.cancelled = self.cancelled, set()
        return RenewOutcome(cancelled=frozenset(cancelled))


class SilentAtFirst(ScriptedQueue):
    """Gives no answer to the first call."""

    _was_asked = False

    async def renew(self, worker: str, renewals: Sequence[Renewal]) -> RenewOutcome:
        if not self._was_asked:
            self._was_asked = True
            await asyncio.Event().wait()
        return await super().renew(worker, renewals)


def make_keeper(
    queue: Any, told: list[str], *held_jobs: HeldJob, interval: float = 0.01, stream_interval: float = 0.01
) -> LeaseKeeper:
    @asynccontextmanager
    async def open_queue() -> AsyncIterator[Any]:
        try:
            yield queue
        finally:
            queue.closed = True

    held = HeldJobs()
    for job in held_jobs:
        held.hold(job)
    return LeaseKeeper(
        open_queue,
        held,
        worker="w1",
        interval=interval,
        stream_interval=stream_interval,
        on_lost=told.append,
        on_cancelled=told.append,
        on_failure=lambda: told.append("failed"),
        unreachable=lambda error: None,
    )


def test_a_renewal_without_an_answer_does_not_hold_up_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs must not make a stopping worker hang (bullmq#2430)."""
    monkeypatch.setattr("tidemill_worker.leases.JOIN_TIMEOUT", 0.05)
    queue, failures = SilentQueue(), []
    keeper = make_keeper(queue, failures, make_held(), interval=60.0)
    with capture_logs() as logs:
        keeper.start()
        assert queue.asked.wait(10)
        keeper.stop()
    assert queue.closed
    assert failures == []
    assert [entry["event"] for entry in logs] == ["renewal_abandoned"]
    keeper.stop()  # harmless


async def test_a_renewal_without_an_answer_is_tried_again_before_the_lease_is_over() -> None:
    """Its connection has gone silent; the next one works."""
    queue = SilentAtFirst(set())
    keeper = make_keeper(queue, [], make_held(), interval=0.2)
    keeper.start()
    await eventually(lambda: queue.renewed)
    keeper.stop()


async def test_a_cancellation_is_heard_between_renewals() -> None:
    """Also of a job that has nothing to renew; of one that has ended, or is not held, nothing is heard."""
    queue = ScriptedQueue({JobId("job"), JobId("ended"), JobId("unknown")})
    told: list[str] = []
    keeper = make_keeper(queue, told, make_held(), make_held("ended", ended=True), interval=60.0)
    keeper.start()
    await eventually(lambda: told)
    keeper.stop()
    assert told == ["job/1"]
    assert queue.renewed[0] == []


async def test_an_idle_worker_asks_nothing() -> None:
    queue = ScriptedQueue(set())
    keeper = make_keeper(queue, [])
    keeper.start()
    await asyncio.sleep(0.1)
    keeper.stop()
    assert queue.renewed == []


async def test_leases_that_are_to_lapse_are_renewed_no_more() -> None:
    queue = ScriptedQueue(set())
    keeper = make_keeper(queue, [], make_held())
    keeper.start()
    await eventually(lambda: queue.renewed)
    keeper.let_lapse()
    await eventually(lambda: queue.closed)
    keeper.stop()  # harmless


class Resolving:
    """Looks up the name of its server in a thread that does not come back until it is let go."""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()
        self.closed = False

    async def renew(self, worker: str, renewals: Sequence[Renewal]) -> RenewOutcome:
        self.asked.set()
        await asyncio.to_thread(self.let_go.wait)
        raise AssertionError("nobody waits for it any more")


def test_a_thread_that_cannot_be_ended_does_not_hold_up_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill_worker.leases.JOIN_TIMEOUT", 0.05)
    queue, failures = Resolving(), []
    keeper = make_keeper(queue, failures, make_held(), interval=60.0)
    keeper.start()
    assert queue.asked.wait(10)
    stopping = threading.Thread(target=keeper.stop)
    stopping.start()
    stopping.join(10)
    assert (stopping.is_alive(), keeper._thread.is_alive()) == (False, True)
    queue.let_go.set()
    keeper._thread.join(10)
    assert (queue.closed, failures) == (True, [])
