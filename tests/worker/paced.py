"""The real engine over a model that steps when a test lets it, for whole workers on a real queue."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.worker.scripted import Script, Step
from tidemill_scheduler import Scheduler, SchedulerConfig, SequenceId, StepPlan
from tidemill_worker.engine import Engine
from tidemill_worker.generation import Generation


@dataclass
class PacedModel(Script):
    """Says tokens that depend on their position alone; takes `patience` seconds for a step that was not
    allowed, or with `None` as long as it takes."""

    patience: float | None = None
    names: set[str] = field(default_factory=set)
    """The requests of which it has computed anything."""
    num_steps: int = 0
    _allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def free(self) -> None:
        self.patience = 0.0
        self.allow(1)

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> Step:
        self.names |= {generations[row.sequence].owner.request.id for row in plan.rows}
        self._allowed.acquire(timeout=self.patience)
        self.num_steps += 1
        return super().run(plan, generations)

    def _next(self, generation: Generation) -> int:
        return 70 + generation.num_output_tokens % 180


@dataclass
class PacedEngine(Engine):
    """What `running_worker` holds up and lets go."""

    runner: PacedModel

    def free(self) -> None:
        self.runner.free()


def make_paced_engine(*, patience: float | None = None, **config: Any) -> PacedEngine:
    settings: dict[str, Any] = {"num_blocks": 1000, "block_size": 4, "max_model_len": 4000}
    scheduler = Scheduler(SchedulerConfig(**(settings | config)))
    return PacedEngine(PacedModel({}, patience=patience), scheduler, frozenset({1}))
