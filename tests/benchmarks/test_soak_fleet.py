"""The soak's supervisor replaces workers, and sees what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

from soak_fleet import Fleet


@dataclass
class FakeProcess:
    """A worker that ends with the status it was given."""

    url: str
    log: Path
    status: int = 0
    is_alive: bool = True
    blocks: float = 0.0
    """What it says of its KV cache, less with each look."""

    def metric(self, name: str) -> float:
        if name != "tidemill_kv_cache_usage_ratio":
            return 0.0
        self.blocks = max(0.0, self.blocks - 0.1)
        return self.blocks

    def terminate(self) -> None:
        self.is_alive = False

    def wait(self) -> int:
        return self.status


class FakeProcesses:
    """Starts fakes."""

    def __init__(self) -> None:
        self.started: list[FakeProcess] = []

    @property
    def alive(self) -> list[FakeProcess]:
        return [process for process in self.started if process.is_alive]

    def start(self, *, queue: str, redis_url: str) -> FakeProcess:
        process = FakeProcess(redis_url, Path(f"worker-{len(self.started)}.log"))
        self.started.append(process)
        return process


def make_fleet(
    urls: Sequence[str] = ("one", "two"), *, patience: float = 60.0
) -> tuple[Fleet, FakeProcesses]:
    processes = FakeProcesses()
    wires = [Mock(url=url) for url in urls]
    fleet = Fleet(processes, wires, queue="soak", patience=patience)
    fleet.start()
    return fleet, processes


def test_each_worker_has_a_wire_and_so_has_whoever_replaces_it() -> None:
    fleet, processes = make_fleet()
    fleet.replace(1)
    assert [process.url for process in processes.started] == ["one", "two", "two"]
    assert [worker.log.name for worker in fleet.workers] == ["worker-0.log", "worker-2.log"]


async def test_a_worker_that_ends_by_itself_is_noted_and_replaced() -> None:
    fleet, processes = make_fleet()
    processes.started[0].is_alive = False
    supervising = asyncio.create_task(fleet.supervise())
    async with asyncio.timeout(10):
        while len(processes.started) < 3:
            await asyncio.sleep(0)
    supervising.cancel()
    assert [worker.log.name for worker in fleet.ended] == ["worker-0.log"]
    assert all(worker.is_alive for worker in fleet.workers)


async def test_a_worker_that_cannot_stop_cleanly_with_nothing_to_do_is_odd() -> None:
    fleet, processes = make_fleet()
    processes.started[1].status = 1
    assert await fleet.stop() == ["worker-1.log: exit status 1 at the end, with nothing to do"]


async def test_workers_are_given_time_to_let_go() -> None:
    fleet, processes = make_fleet()
    processes.started[0].blocks = 0.3
    assert await fleet.until_idle() == []


async def test_blocks_that_are_never_freed_are_odd() -> None:
    fleet, processes = make_fleet(patience=0.0)
    processes.started[1].blocks = 0.6
    assert await fleet.until_idle() == ["worker-1.log: tidemill_kv_cache_usage_ratio is 0.5"]
