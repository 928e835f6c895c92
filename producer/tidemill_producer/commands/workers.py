"""`tidemill workers`: who serves, and what each worker runs and has room for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.table import Column
from rich.text import Text

from tidemill.client import DEFAULT_URL, Client
from tidemill.discovery import queue_names
from tidemill.errors import QueueUnavailable
from tidemill.registry import WorkerReport, WorkerState, WorkerView
from tidemill_producer.commands.options import AsJson, Queues, RedisUrl, complain, print_json
from tidemill_producer.commands.table import cell, make_console, make_table

STYLES = {WorkerState.SERVING: "green", WorkerState.DRAINING: "yellow", WorkerState.STALLED: "bold red"}
DISCOVERY_INTERVAL = 30.0
VAIN_DISCOVERY_INTERVAL = 3.0
"""Seconds from one look for queues to the next: if there were some, and if there were none."""
LATE = 2.0
"""Heartbeats after which a worker that was not heard of is shown as late."""


def workers(
    queues: Queues = None,
    redis_url: RedisUrl = DEFAULT_URL,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Look again so often, until interrupted."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the workers of all queues: what each serves, runs, and has room for, by its last report.

    RUNNING counts generations in the batch, of those that can be held at once; WAITING those that wait
    for a place in it. ROOM is for how many more there is; a worker that drains or has stalled takes none.
    KV is the part of its KV cache that is in use.
    """
    if as_json and watch is not None:
        raise typer.BadParameter("give --json or --watch, not both", param_hint="--watch")
    fleet = Fleet(redis_url, queues)
    if watch is not None:
        _watch(fleet, watch)
        return
    views = asyncio.run(fleet.look())
    if as_json:
        for view in views:
            print_json(_as_json(view))
    elif views:
        make_console().print(_table(views))
    if not views:
        complain(fleet.emptiness)


class Fleet:
    """The workers of some queues, or of all that the server has."""

    def __init__(
        self, url: str, queues: Sequence[str] | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`queues` are the names of the only ones to look at."""
        self._url = url
        self._queues = queues
        self._found: Sequence[str] = ()
        self._clock = clock
        self._next_discovery = 0.0

    async def look(self) -> list[WorkerView]:
        """Every worker, by queue and name.

        Raises:
            QueueUnavailable: Redis cannot be used.
        """
        views: list[WorkerView] = []
        for name in self._queues or await self._names():
            async with Client(self._url, queue=name) as client:
                views += await client.workers()
        return views

    async def _names(self) -> Sequence[str]:
        """Which queues there are; not looked up at every look, because that walks all keys of the server."""
        if self._clock() >= self._next_discovery:
            self._found = await queue_names(self._url)
            interval = DISCOVERY_INTERVAL if self._found else VAIN_DISCOVERY_INTERVAL
            self._next_discovery = self._clock() + interval
        return self._found

    @property
    def emptiness(self) -> str:
        """What is to be said if there are none."""
        if self._queues:
            return f"no worker serves queue {' or '.join(self._queues)}"
        return "no worker serves any queue here"


def _watch(fleet: Fleet, interval: float) -> None:
    """On a terminal the table is redrawn in place; elsewhere one follows the other."""
    console = make_console()
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                frame = _frame(fleet)
                if console.is_terminal:
                    live.update(frame, refresh=True)
                else:
                    console.print(frame, Text())
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _frame(fleet: Fleet) -> RenderableType:
    """An outage is shown, and does not end the watch."""
    try:
        views = asyncio.run(fleet.look())
    except QueueUnavailable as error:
        return Text(str(error), "red")
    return _table(views) if views else Text(fleet.emptiness)


def _room(report: WorkerReport) -> int:
    if report.state is not WorkerState.SERVING:
        return 0
    return max(0, report.capacity - report.running - report.waiting)


def _as_json(view: WorkerView) -> dict[str, Any]:
    return view.report.model_dump(mode="json") | {"room": _room(view.report), "age": view.age}


def _table(views: Sequence[WorkerView]) -> RenderableType:
    """A queue is usually named after its model: then the names stand there once, for narrow terminals."""
    shows_model = any(view.report.model != view.report.queue for view in views)
    names = ("WORKER", "QUEUE", "MODEL") if shows_model else ("WORKER", "QUEUE")
    table = make_table(
        *(Column(name, overflow="fold") for name in names),
        Column("STATE", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in ("RUNNING", "WAITING", "ROOM", "KV")),
        Column("HEARD", justify="right", no_wrap=True),
    )
    for view in views:
        report = view.report
        late = view.age > LATE * report.heartbeat
        table.add_row(
            *map(cell, (report.name, report.queue, report.model)[: len(names)]),
            cell(report.state, STYLES.get(report.state, "")),
            f"{report.running}/{report.capacity}",
            str(report.waiting),
            str(_room(report)),
            f"{report.kv_usage:.0%}",
            cell(f"{view.age:.0f} s ago", "yellow" if late else ""),
        )
    return table
