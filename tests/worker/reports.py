"""What a worker says of itself, for tests that have none."""

from __future__ import annotations

from typing import Any

from tidemill.card import ModelCard
from tidemill.registry import WorkerReport, WorkerState
from tidemill_worker.admission import ModelLimits


def make_card(limits: ModelLimits) -> ModelCard:
    return ModelCard(
        model=limits.model_name,
        max_model_len=limits.max_model_len,
        max_total_tokens=limits.max_total_tokens,
    )


def make_report(**changes: Any) -> WorkerReport:
    values: dict[str, Any] = {
        **{"name": "w1", "queue": "q", "model": "m", "host": "h", "pid": 1, "version": "0"},
        **{"fingerprint": "f1", "device": "cpu", "state": WorkerState.SERVING, "capacity": 8},
        **{"heartbeat": 5.0},
        **dict.fromkeys(("running", "waiting", "held", "unrecorded"), 0),
        **{"kv_usage": 0.0, "uptime": 0.0},
    }
    return WorkerReport(**(values | changes))
