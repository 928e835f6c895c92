"""What the soak does to workers, server and wires, and when: all of it drawn from one seed beforehand."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from servers import OwnServer
from soak_fleet import Fleet
from wire import Wire

FREEZES, TERMINATIONS, FLUSHES, CUTS = 0.2, 0.3, 0.05, 0.3
"""So many of these for each kill."""
FREEZE_LEASES = (1.2, 3.0)
"""How long a worker is frozen, in leases: it always loses what it holds."""
OUTAGE = 2.0
"""Seconds that a server is down, or a wire is cut, at most."""
TWICE_WITHIN = 1.0
"""Seconds: a terminated worker whose blow is to last less is told a second time at its end."""


class Blow(StrEnum):
    """What can happen."""

    KILL = "kill"
    """SIGKILL to a worker as soon as it serves; another takes its place at once."""
    FREEZE = "freeze"
    """SIGSTOP to a worker, SIGCONT after its leases have lapsed."""
    TERMINATE = "terminate"
    """SIGTERM to a worker, perhaps twice; another takes its place at once."""
    SERVER_KILL = "server_kill"
    """SIGKILL to the server, which is started again on its data."""
    SERVER_STOP = "server_stop"
    """SIGTERM to the server, which is started again on its data."""
    FLUSH_SCRIPTS = "flush_scripts"
    CUT = "cut"
    """All connections of a worker, or of the clients, break; new ones are refused for a while."""


@dataclass(frozen=True)
class Planned:
    """One blow: when, to whom, and for how long where it lasts. Seconds."""

    at: float
    blow: Blow
    target: int
    """Number of the worker; for a cut, the number after the last worker's is that of the clients."""
    seconds: float


def plan(
    *, seconds: float, kills: int, restarts: int, workers: int, lease: float, seed: int
) -> list[Planned]:
    """Spread all blows evenly at random over the time, except the last tenth of it.

    A quiet end leaves time for what the last blows have begun; half of the restarts are kills.
    """
    dice = random.Random(seed)
    counts = {
        Blow.KILL: kills,
        Blow.FREEZE: round(FREEZES * kills),
        Blow.TERMINATE: round(TERMINATIONS * kills),
        Blow.SERVER_KILL: restarts - restarts // 2,
        Blow.SERVER_STOP: restarts // 2,
        Blow.FLUSH_SCRIPTS: round(FLUSHES * kills),
        Blow.CUT: round(CUTS * kills),
    }
    lasts = {Blow.FREEZE: (FREEZE_LEASES[0] * lease, FREEZE_LEASES[1] * lease)}
    blows = [
        Planned(
            at=dice.uniform(0.0, 0.9 * seconds),
            blow=blow,
            target=dice.randrange(workers + (blow is Blow.CUT)),
            seconds=dice.uniform(*lasts.get(blow, (0.0, OUTAGE))),
        )
        for blow, count in counts.items()
        for _ in range(count)
    ]
    return sorted(blows, key=lambda planned: planned.at)


@dataclass
class Tormentor:
    """Carries out a plan."""

    fleet: Fleet
    server: OwnServer
    wires: Sequence[Wire]
    done: Counter[Blow] = field(default_factory=Counter)
    """What has been carried out, to the end; not what was to hit a worker that had just ended."""
    _server_is_up: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, plan: Sequence[Planned]) -> None:
        """Return when all is done: everything thawed, mended and started again."""
        clock = asyncio.get_running_loop().time
        start = clock()
        async with asyncio.TaskGroup() as under_way:
            for planned in plan:
                await asyncio.sleep(max(0.0, start + planned.at - clock()))
                under_way.create_task(self._strike(planned))

    async def _strike(self, planned: Planned) -> None:
        with suppress(ProcessLookupError):
            await self._carry_out(planned)
            self.done[planned.blow] += 1

    async def _carry_out(self, planned: Planned) -> None:
        match planned.blow:
            case Blow.KILL:
                await self.fleet.kill(planned.target)
            case Blow.FREEZE:
                await self._freeze(planned.target, planned.seconds)
            case Blow.TERMINATE:
                await self._terminate(planned.target, planned.seconds)
            case Blow.SERVER_KILL:
                await self._restart_server(signal.SIGKILL, planned.seconds)
            case Blow.SERVER_STOP:
                await self._restart_server(signal.SIGTERM, planned.seconds)
            case Blow.FLUSH_SCRIPTS:
                async with self._server_is_up:
                    await asyncio.to_thread(self._flush_scripts)
            case Blow.CUT:
                await self._cut(self.wires[planned.target], planned.seconds)

    async def _freeze(self, number: int, seconds: float) -> None:
        worker = self.fleet.workers[number]
        worker.freeze()
        await asyncio.sleep(seconds)
        worker.thaw()

    async def _terminate(self, number: int, seconds: float) -> None:
        worker = self.fleet.terminate(number)
        if seconds < TWICE_WITHIN:
            await asyncio.sleep(seconds)
            if worker.is_alive:
                worker.terminate()

    async def _restart_server(self, how: signal.Signals, seconds: float) -> None:
        async with self._server_is_up:
            await asyncio.to_thread(self.server.end, how)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(self.server.start)

    def _flush_scripts(self) -> None:
        with self.server.client() as client:
            client.script_flush()

    async def _cut(self, wire: Wire, seconds: float) -> None:
        wire.cut()
        await asyncio.sleep(seconds)
        wire.mend()
