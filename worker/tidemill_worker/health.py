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
        stats, held, state = self.service.engine.stats, self.service.held, _state(self.service)
        return Health(
            ok=state == "alive",
            details={
                "engine": state,
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "held": len(held),
                "unrecorded": held.num_unrecorded,
            },
        )


def _state(service: Service) -> str:
    """The engine's, in one word."""
    if service.state is WorkerState.STALLED:
        return "stalled"
    if service.engine.is_alive:
        return "alive"
    return "stopped" if service.engine.has_started else "starting"
