"""Whether a worker should be left running, for whoever asks at its endpoint."""

from __future__ import annotations

from tidemill.registry import WorkerState
from tidemill_worker.endpoint import Health
from tidemill_worker.service import Service


class HealthProbe:
    """Healthy is a worker whose engine thread lives and makes steps; Redis may come and go."""

    def __init__(self) -> None:
        self.service: Service | None = None
        """Set when the model is ready; until then the worker is not healthy yet."""

    def __call__(self) -> Health:
        if self.service is None:
            return Health(ok=False, details={"engine": "loading"})
        engine, held = self.service.engine, self.service.held
        is_stalled = self.service.state is WorkerState.STALLED
        return Health(
            ok=engine.is_alive and not is_stalled,
            details={
                "engine": "stalled" if is_stalled else "alive" if engine.is_alive else "stopped",
                "running": engine.stats.num_running,
                "waiting": engine.stats.num_waiting,
                "held": len(held),
                "unrecorded": held.num_unrecorded,
            },
        )
