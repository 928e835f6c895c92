"""The soak's workers, and the supervisor that starts another in the place of each that ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from wire import Wire
from worker_processes import WorkerProcess, WorkerProcesses

PAUSE = 0.2
"""Seconds between two looks at the workers."""
EMPTY = (
    "tidemill_requests_running",
    "tidemill_requests_waiting",
    "tidemill_kv_cache_usage_ratio",
    "tidemill_results_waiting",
)
"""Metrics of a worker that are 0 when it has nothing to do."""


@dataclass
class Fleet:
    """Workers by number, each behind a wire of its own; there is always one of each.

    Args:
        queue: what they serve.
        patience: seconds in which they must have let go of everything once there is nothing to do.
    """

    processes: WorkerProcesses
    wires: Sequence[Wire]
    queue: str
    patience: float
    workers: list[WorkerProcess] = field(default_factory=list)
    ended: list[WorkerProcess] = field(default_factory=list)
    """Those that ended although nobody had told them to."""

    def start(self) -> None:
        self.workers = [self._start(wire) for wire in self.wires]

    def replace(self, number: int) -> None:
        """Start another worker under this number."""
        self.workers[number] = self._start(self.wires[number])

    def _start(self, wire: Wire) -> WorkerProcess:
        return self.processes.start(queue=self.queue, redis_url=wire.url)

    async def supervise(self) -> None:
        """Replace workers that end by themselves, until cancelled."""
        while True:
            for number, worker in enumerate(self.workers):
                if not worker.is_alive:
                    self.ended.append(worker)
                    self.replace(number)
            await asyncio.sleep(PAUSE)

    async def until_idle(self) -> list[str]:
        """Return when no worker has anything left, or what they still have when patience ends."""
        give_up = time.monotonic() + self.patience
        while True:
            left = [line for worker in self.workers for line in await asyncio.to_thread(_left_in, worker)]
            if not left or time.monotonic() > give_up:
                return left
            await asyncio.sleep(PAUSE)

    async def stop(self) -> list[str]:
        """Terminate all and wait for them; what is odd about how they ended."""
        alive = self.processes.alive
        for worker in alive:
            worker.terminate()
        statuses = [await asyncio.to_thread(_status, worker) for worker in alive]
        return [
            f"{worker.log.name}: {status} at the end, with nothing to do"
            for worker, status in zip(alive, statuses, strict=True)
            if status != "exit status 0"
        ]


def _left_in(worker: WorkerProcess) -> list[str]:
    try:
        values = {name: worker.metric(name) for name in EMPTY}
    except (OSError, KeyError) as error:
        return [f"{worker.log.name}: does not say what it holds: {error!r}"]
    return [f"{worker.log.name}: {name} is {value:g}" for name, value in values.items() if value]


def _status(worker: WorkerProcess) -> str:
    try:
        return f"exit status {worker.wait()}"
    except TimeoutError:
        return "does not end"
