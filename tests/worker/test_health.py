"""What the endpoint says of a worker's health."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.factories import make_held, make_stats
from tidemill.registry import WorkerState
from tidemill_worker.health import HealthProbe
from tidemill_worker.held import HeldJobs


@pytest.mark.parametrize(
    ("state", "is_alive", "has_started", "ok", "engine"),
    [
        (WorkerState.SERVING, True, True, True, "alive"),
        (WorkerState.DRAINING, True, True, True, "alive"),
        (WorkerState.STALLED, True, True, False, "stalled"),
        (WorkerState.SERVING, False, True, False, "stopped"),
        (WorkerState.SERVING, False, False, False, "starting"),
    ],
)
def test_a_worker_whose_engine_does_not_move_is_not_healthy(
    state: WorkerState, is_alive: bool, has_started: bool, ok: bool, engine: str
) -> None:
    """Not to be left running with health 200 (vllm#45414)."""
    held = HeldJobs()
    held.hold(make_held(ended=True))
    thread = SimpleNamespace(
        is_alive=is_alive, has_started=has_started, stats=make_stats(num_running=2, num_waiting=5)
    )
    service: Any = SimpleNamespace(engine=thread, held=held, state=state)
    probe = HealthProbe()
    probe.service = service
    health = probe()
    assert health.ok is ok
    expected = {"engine": engine, "running": 2, "waiting": 5, "held": 1, "unrecorded": 1}
    assert health.details == expected


def test_a_worker_that_loads_its_model_is_not_healthy_yet() -> None:
    health = HealthProbe()()
    assert (health.ok, health.details) == (False, {"engine": "loading"})
