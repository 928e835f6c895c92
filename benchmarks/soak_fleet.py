"""The soak's workers, and the supervisor that starts another in the place of each that ends."""

from __future__ import annotations

import asyncio
import signal
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
    told: list[WorkerProcess] = field(default_factory=list)
    """Those that were told to stop."""
    late: list[WorkerProcess] = field(default_factory=list)
    """Those that were given up because they did not get to serve."""

    def start(self) -> None:
        self.workers = [self._start(wire) for wire in self.wires]

    def _start(self, wire: Wire) -> WorkerProcess:
        return self.processes.start(queue=self.queue, redis_url=wire.url)

    def _replace(self, number: int) -> None:
        self.workers[number] = self._start(self.wires[number])

    async def kill(self, number: int) -> None:
        """Kill one that serves, once there is one under this number, and start another."""
        worker = await self._serving(number)
        worker.kill()
        if worker.wait() != -signal.SIGKILL:
            self.ended.append(worker)
        self._replace(number)

    async def _serving(self, number: int) -> WorkerProcess:
        while True:
            worker = self.workers[number]
            try:
                await worker.ready()
            except TimeoutError:
                self._give_up(number, worker)
            except RuntimeError:  # it has ended before that
                pass
            else:
                if worker is self.workers[number] and worker.is_alive:
                    return worker
            await asyncio.sleep(PAUSE)

    def _give_up(self, number: int, worker: WorkerProcess) -> None:
        if worker is self.workers[number]:
            self.late.append(worker)
            worker.kill()
            self._replace(number)

    def terminate(self, number: int) -> WorkerProcess:
        """Tell one to stop, and start another at once.

        Raises:
            ProcessLookupError: it has ended by itself.
        """
        worker = self.workers[number]
        if not worker.is_alive:
            raise ProcessLookupError(worker.log.name)
        worker.terminate()
        self.told.append(worker)
        self._replace(number)
        return worker

    async def supervise(self) -> None:
        """Replace workers that end by themselves, until cancelled."""
        while True:
            for number, worker in enumerate(self.workers):
                if not worker.is_alive:
                    self.ended.append(worker)
                    self._replace(number)
            await asyncio.sleep(PAUSE)

    async def until_idle(self) -> list[str]:
        """Return when no worker has anything left, or what they still have when patience ends.

        That begins once all serve: one that is still starting has no answer.
        """
        for number in range(len(self.workers)):
            await self._serving(number)
        give_up = time.monotonic() + self.patience
        while True:
            left = [line for worker in self.workers for line in await asyncio.to_thread(_left_in, worker)]
            if not left or time.monotonic() > give_up:
                return left
            await asyncio.sleep(PAUSE)

    async def stop(self) -> list[str]:
        """Tell all to stop and wait for them; what is odd about how workers have ended, now or before."""
        for worker in self.workers:
            worker.terminate()
        self.told += self.workers
        faults = [(worker, await asyncio.to_thread(_fault_of_stop, worker)) for worker in self.told]
        odd = [f"{worker.log.name}: ended by itself, exit status {worker.wait()}" for worker in self.ended]
        odd += [f"{worker.log.name}: did not get to serve" for worker in self.late]
        return odd + [f"{worker.log.name}: told to stop, {fault}" for worker, fault in faults if fault]


def _fault_of_stop(worker: WorkerProcess) -> str:
    """Empty if it has ended as it should: well, or before its first line of code had run."""
    try:
        status = worker.wait()
    except TimeoutError:
        return "does not end"
    if status == 0 or (status == -signal.SIGTERM and not worker.log.read_text()):
        return ""
    return f"exit status {status}"


def _left_in(worker: WorkerProcess) -> list[str]:
    try:
        values = {name: worker.metric(name) for name in EMPTY}
    except (OSError, KeyError) as error:
        return [f"{worker.log.name}: does not say what it holds: {error!r}"]
    return [f"{worker.log.name}: {name} is {value:g}" for name, value in values.items() if value]
