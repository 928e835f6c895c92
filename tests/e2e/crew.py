"""Several workers on one queue, for tests that kill and stop them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.processes import Worker, worker_process

PLACES = 4
"""Jobs that one worker of the crew holds at most."""
LEASE = 3.0


@dataclass
class Crew:
    """Workers that outlive a test serve the next one, if that wants one of their kind."""

    model: Path
    url: str
    queue: str
    folder: Path
    workers: dict[float, list[Worker]] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    async def exactly(self, *grace_periods: float) -> list[Worker]:
        """One live worker per grace period (seconds), and none beside them."""
        chosen = [self._find(grace_period) or self.start(grace_period) for grace_period in grace_periods]
        for others in self.workers.values():
            for worker in others:
                if worker.is_alive:
                    worker.kill()
        self.workers = {}
        for grace_period, worker in zip(grace_periods, chosen, strict=True):
            self.workers.setdefault(grace_period, []).append(worker)
            await worker.ready()
        return chosen

    def start(self, grace_period: float) -> Worker:
        """One more, which loads its model while the test goes on."""
        return self._stack.enter_context(
            worker_process(
                self.model,
                self.url,
                self.queue,
                self.folder,
                grace_period=grace_period,
                lease=LEASE,
                renewal=0.2,
                stream_interval=0.1,
                max_num_seqs=PLACES,
                claim_ahead=0,
                kv_cache_memory=0.1,
            )
        )

    def _find(self, grace_period: float) -> Worker | None:
        found = [worker for worker in self.workers.get(grace_period, []) if worker.is_alive]
        if not found:
            return None
        self.workers[grace_period].remove(found[0])
        return found[0]

    def close(self) -> None:
        self._stack.close()
