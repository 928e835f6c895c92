"""The torment is drawn from its seed, is complete, and leaves nothing frozen, cut or down."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
from soak_torment import Blow, Planned, Tormentor, plan

WORKERS = 3
LEASE = 2.0


def make_plan(*, seed: int = 0, kills: int = 100, restarts: int = 5, seconds: float = 600.0) -> list[Planned]:
    return plan(seconds=seconds, kills=kills, restarts=restarts, workers=WORKERS, lease=LEASE, seed=seed)


def test_the_seed_decides() -> None:
    assert make_plan() == make_plan()
    assert make_plan() != make_plan(seed=1)


def test_every_kind_of_blow_is_struck_as_often_as_asked() -> None:
    counts = Counter(planned.blow for planned in make_plan())
    assert set(counts) == set(Blow)
    assert counts[Blow.KILL] == 100
    assert counts[Blow.SERVER_KILL] + counts[Blow.SERVER_STOP] == 5
    assert counts[Blow.SERVER_KILL] - counts[Blow.SERVER_STOP] == 1


def test_blows_come_in_order_hit_everybody_and_leave_a_quiet_end() -> None:
    planned = make_plan()
    times = [one.at for one in planned]
    assert times == sorted(times)
    assert times[-1] <= 540.0
    assert {one.target for one in planned if one.blow is Blow.KILL} == set(range(WORKERS))
    assert {one.target for one in planned if one.blow is Blow.CUT} == set(range(WORKERS + 1))


def test_whoever_is_frozen_loses_the_lease() -> None:
    frozen = [one.seconds for one in make_plan() if one.blow is Blow.FREEZE]
    assert min(frozen) > LEASE


@dataclass
class FakeWorker:
    """Notes what is done to it."""

    told: list[str] = field(default_factory=list)
    is_alive: bool = True

    def freeze(self) -> None:
        if not self.is_alive:
            raise ProcessLookupError
        self.told.append("freeze")

    def thaw(self) -> None:
        self.told.append("thaw")

    def terminate(self) -> None:
        self.told.append("terminate")


class FakeFleet:
    """Workers of whom each has a number."""

    def __init__(self) -> None:
        self.workers = [FakeWorker() for _ in range(WORKERS)]
        self.replaced: list[FakeWorker] = []

    async def kill(self, number: int) -> None:
        self._replace(number, "kill")

    def terminate(self, number: int) -> FakeWorker:
        if not self.workers[number].is_alive:
            raise ProcessLookupError
        return self._replace(number, "terminate")

    def _replace(self, number: int, told: str) -> FakeWorker:
        worker = self.workers[number]
        worker.told.append(told)
        self.replaced.append(worker)
        self.workers[number] = FakeWorker()
        return worker


class FakeServer:
    """Notes how it was ended and started, and whether it was asked meanwhile."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def end(self, how: signal.Signals) -> None:
        self.told.append(how)

    def start(self) -> None:
        self.told.append("start")

    def client(self) -> AbstractContextManager[Any]:
        return nullcontext(self)

    def script_flush(self) -> None:
        self.told.append("flush")


def make_tormentor() -> tuple[Tormentor, FakeFleet, FakeServer, list[Mock]]:
    fleet, server, wires = FakeFleet(), FakeServer(), [Mock() for _ in range(WORKERS + 1)]
    return Tormentor(fleet, server, wires), fleet, server, wires


def soon(*blows: Blow, seconds: float = 0.0) -> Sequence[Planned]:
    return [Planned(0.0, blow, target=0, seconds=seconds) for blow in blows]


@pytest.mark.parametrize(("blow", "told"), [(Blow.KILL, "kill"), (Blow.TERMINATE, "terminate")])
async def test_a_worker_that_is_ended_is_replaced(blow: Blow, told: str) -> None:
    tormentor, fleet, _, _ = make_tormentor()
    await tormentor.run(soon(blow))
    assert [worker.told[0] for worker in fleet.replaced] == [told]
    assert fleet.workers[0].told == []


async def test_some_are_told_twice_to_stop() -> None:
    tormentor, fleet, _, _ = make_tormentor()
    await tormentor.run([Planned(0.0, Blow.TERMINATE, 0, 0.0), Planned(0.0, Blow.TERMINATE, 1, 2.0)])
    assert [len(worker.told) for worker in fleet.replaced] == [2, 1]


async def test_a_frozen_worker_is_thawed() -> None:
    tormentor, fleet, _, _ = make_tormentor()
    await tormentor.run(soon(Blow.FREEZE))
    assert fleet.workers[0].told == ["freeze", "thaw"]


@pytest.mark.parametrize("blow", [Blow.FREEZE, Blow.TERMINATE])
async def test_a_blow_to_a_worker_that_has_ended_does_not_count_and_ends_nothing(blow: Blow) -> None:
    tormentor, fleet, _, _ = make_tormentor()
    fleet.workers[0].is_alive = False
    await tormentor.run(soon(blow, Blow.KILL))
    assert tormentor.done == {Blow.KILL: 1}


async def test_two_restarts_at_once_are_two_restarts() -> None:
    tormentor, _, server, _ = make_tormentor()
    await tormentor.run(soon(Blow.SERVER_KILL, Blow.SERVER_STOP, seconds=0.01))
    assert server.told == [signal.SIGKILL, "start", signal.SIGTERM, "start"]


async def test_scripts_are_flushed_once_the_server_is_back() -> None:
    tormentor, _, server, _ = make_tormentor()
    await tormentor.run(soon(Blow.SERVER_KILL, Blow.FLUSH_SCRIPTS, seconds=0.01))
    assert server.told == [signal.SIGKILL, "start", "flush"]


async def test_a_wire_that_was_cut_is_mended() -> None:
    tormentor, _, _, wires = make_tormentor()
    await tormentor.run(soon(Blow.CUT))
    assert [call[0] for call in wires[0].method_calls] == ["cut", "mend"]


async def test_what_was_done_is_what_was_planned() -> None:
    tormentor, _, _, _ = make_tormentor()
    planned = make_plan(kills=10, seconds=0.1)
    await tormentor.run([Planned(one.at, one.blow, one.target, 0.0) for one in planned])
    assert tormentor.done == Counter(one.blow for one in planned)
