"""The soak's supervisor replaces workers, and sees how they end and what they leave behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
from soak_fleet import Fleet


@dataclass
class FakeProcess:
    """A worker that ends with the status it was given."""

    url: str
    log: Path
    status: int = 0
    is_alive: bool = True
    is_killed: bool = False
    starting: int = 0
    """How many times one has to look until it serves."""
    is_stuck: bool = False
    """Whether it never serves."""
    dies_at: str = ""
    """When it ends by itself: as somebody waits for it to serve, or as it is about to be killed."""
    blocks: float = 0.0
    """What it says of its KV cache, less with each look."""

    async def ready(self) -> None:
        while self.starting:
            self.starting -= 1
            await asyncio.sleep(0)
        if self.is_stuck:
            raise TimeoutError
        if self.dies_at == "start":
            self.is_alive = False
            raise RuntimeError("it has ended")

    def metric(self, name: str) -> float:
        if name != "tidemill_kv_cache_usage_ratio":
            return 0.0
        self.blocks = max(0.0, self.blocks - 0.1)
        return self.blocks

    def kill(self) -> None:
        if self.dies_at != "kill":
            self.status = -signal.SIGKILL
        assert not self.starting
        self.is_alive, self.is_killed = False, True

    def terminate(self) -> None:
        self.is_alive = False

    def wait(self) -> int:
        return self.status


class FakeProcesses:
    """Starts fakes."""

    def __init__(self, folder: Path) -> None:
        self.started: list[FakeProcess] = []
        self._folder = folder

    def start(self, *, queue: str, redis_url: str) -> FakeProcess:
        process = FakeProcess(redis_url, self._folder / f"worker-{len(self.started)}.log")
        process.log.write_text("event=serving")
        self.started.append(process)
        return process


@pytest.fixture
def processes(tmp_path: Path) -> FakeProcesses:
    return FakeProcesses(tmp_path)


def make_fleet(
    processes: FakeProcesses, urls: Sequence[str] = ("one", "two"), *, patience: float = 60.0
) -> Fleet:
    fleet = Fleet(processes, [Mock(url=url) for url in urls], queue="soak", patience=patience)
    fleet.start()
    return fleet


async def supervised(fleet: Fleet, processes: FakeProcesses, count: int) -> None:
    """Return once so many have been started."""
    supervising = asyncio.create_task(fleet.supervise())
    async with asyncio.timeout(10):
        while len(processes.started) < count:
            await asyncio.sleep(0)
    supervising.cancel()


def names(workers: Sequence[FakeProcess]) -> list[str]:
    return [worker.log.name for worker in workers]


async def test_each_worker_has_a_wire_and_so_has_whoever_replaces_it(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    await fleet.kill(1)
    fleet.terminate(1)
    assert [process.url for process in processes.started] == ["one", "two", "two", "two"]
    assert names(fleet.workers) == ["worker-0.log", "worker-3.log"]


async def test_nobody_is_killed_before_it_serves(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    processes.started[0].starting = 3
    await fleet.kill(0)
    assert processes.started[0].is_killed
    assert fleet.ended == []


async def test_if_one_ends_before_a_kill_goes_to_whoever_serves_next(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    processes.started[0].dies_at = "start"
    killing = asyncio.create_task(fleet.kill(0))
    await supervised(fleet, processes, 3)
    await killing
    assert [process.is_killed for process in processes.started] == [False, False, True, False]
    assert names(fleet.ended) == ["worker-0.log"]


async def test_two_kills_at_once_are_two_kills(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    processes.started[0].starting = 3
    await asyncio.gather(fleet.kill(0), fleet.kill(0))
    assert [process.is_killed for process in processes.started] == [True, False, True, False]


async def test_a_worker_that_ends_by_itself_is_noted_and_replaced(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    processes.started[0].is_alive = False
    await supervised(fleet, processes, 3)
    assert names(fleet.ended) == ["worker-0.log"]
    assert all(worker.is_alive for worker in fleet.workers)
    assert await fleet.stop() == ["worker-0.log: ended by itself, exit status 0"]


async def test_one_that_ends_just_before_it_is_killed_has_ended_by_itself(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    processes.started[0].dies_at, processes.started[0].status = "kill", 7
    await fleet.kill(0)
    assert await fleet.stop() == ["worker-0.log: ended by itself, exit status 7"]


async def test_one_that_never_serves_is_noted_and_replaced(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    processes.started[0].is_stuck = True
    await asyncio.gather(fleet.kill(0), fleet.kill(0))
    assert [process.is_killed for process in processes.started] == [True, False, True, True, False]
    assert await fleet.stop() == ["worker-0.log: did not get to serve"]


async def test_nobody_who_has_ended_is_told_to_stop(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    processes.started[0].is_alive = False
    with pytest.raises(ProcessLookupError):
        fleet.terminate(0)
    assert fleet.told == []
    assert len(processes.started) == 2


async def test_workers_that_are_killed_or_stop_well_are_not_odd(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    await fleet.kill(0)
    fleet.terminate(1)
    assert await fleet.stop() == []


async def test_a_worker_that_cannot_stop_well_is_odd_now_or_before(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    fleet.terminate(0)
    processes.started[0].status = processes.started[1].status = 1
    assert await fleet.stop() == [
        "worker-0.log: told to stop, exit status 1",
        "worker-1.log: told to stop, exit status 1",
    ]


@pytest.mark.parametrize(("log", "faults"), [("", 0), ("event=model_loaded", 1)])
async def test_the_signal_ends_it_only_before_its_first_line_has_run(
    processes: FakeProcesses, log: str, faults: int
) -> None:
    fleet = make_fleet(processes)
    processes.started[0].status = -signal.SIGTERM
    processes.started[0].log.write_text(log)
    assert len(await fleet.stop()) == faults


async def test_a_worker_that_does_not_stop_is_odd(
    processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(processes, ["one"])
    monkeypatch.setattr(processes.started[0], "wait", Mock(side_effect=TimeoutError))
    assert await fleet.stop() == ["worker-0.log: told to stop, does not end"]


async def test_workers_are_given_time_to_let_go(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes)
    processes.started[0].blocks = 0.3
    assert await fleet.until_idle() == []


async def test_blocks_that_are_never_freed_are_odd(processes: FakeProcesses) -> None:
    fleet = make_fleet(processes, patience=0.0)
    processes.started[1].blocks = 0.6
    assert await fleet.until_idle() == ["worker-1.log: tidemill_kv_cache_usage_ratio is 0.5"]
