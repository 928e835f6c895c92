"""An engine whose steps do not return."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tests.worker.factories import FakeEngine
from tidemill_worker.engine import StepOutput


@dataclass
class HangingEngine(FakeEngine):
    """While it hangs, its steps wait until it is freed."""

    hangs: bool = True
    stepping: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    def step(self) -> list[StepOutput]:
        if self.hangs:
            self.stepping.set()
            self.let_go.wait()
        return super().step()

    def free(self) -> None:
        self.let_go.set()
        super().free()
