"""What the queue costs: moves per second, memory of a waiting job, and what a long line changes.

    python benchmarks/queue_moves.py [--server valkey|redis|both] [--quick] [--json PATH]

One client and one worker's side in this process, one server beside it that appends to a file as the
embedded queue does. Names of figures end in `_redis` where they are Redis 7.0's and not Valkey 9's.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import cast

from measure import Run, benchmark_parser, report, timed
from offline import run_direct, run_queue, running_queue, take_turns
from queue_load import LEASES, Bench, Standing, standing
from rich.console import Console
from rich.table import Table
from servers import KINDS, OwnServer, running
from transformers import AutoTokenizer
from workload import FLAGS, Encoding, make_workload

from tidemill_worker.app import build_model
from tidemill_worker.model.checkpoint import locate_embedded
from tidemill_worker.settings import load_settings


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    rounds: int
    jobs: int
    """Submitted, claimed and finished in one round."""
    requests: int
    """Of the real model, through the queue and directly."""


FULL = Extent(rounds=5, jobs=20_000, requests=128)
QUICK = Extent(rounds=3, jobs=4_000, requests=12)
LINES = (1_000, 100_000)
"""Jobs that wait while claims and depths are timed."""
RENEWALS = 5
"""Of the same leases, in each round."""


@dataclass
class Measured:
    """The values of one figure."""

    name: str
    values: list[float] = field(default_factory=list)
    foreign: float = 0.0
    """The largest share of the machine that others used meanwhile."""

    def add(self, value: float, run: Run) -> None:
        self.values.append(value)
        self.foreign = max(self.foreign, run.foreign)

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Figures:
    """All figures of one run, by name, in the order in which they were first measured."""

    def __init__(self) -> None:
        self._measured: dict[str, Measured] = {}

    def add(self, name: str, value: float, run: Run) -> None:
        self._measured.setdefault(name, Measured(name)).add(value, run)

    async def rate(self, name: str, count: int, work: Awaitable[object]) -> None:
        """Time `work`, which does `count` things."""
        with timed() as run:
            await work
        self.add(name, count / run.seconds, run)

    @property
    def all(self) -> Sequence[Measured]:
        return list(self._measured.values())

    @property
    def medians(self) -> dict[str, float]:
        return {one.name: one.median for one in self.all}


def main() -> None:
    parser = benchmark_parser(__doc__, quick="fewer jobs, rounds and requests")
    parser.add_argument("--server", choices=(*KINDS, "both"), default="valkey", help="default: valkey")
    arguments = parser.parse_args()
    extent = QUICK if arguments.quick else FULL
    kinds = KINDS if arguments.server == "both" else (arguments.server,)

    figures = Figures()
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder, running(kind, Path(folder)) as server:
            asyncio.run(measure(server, extent, figures, suffix="" if kind == "valkey" else f"_{kind}"))
    compare_with_direct(extent.requests, figures)

    print_table(figures.all)
    settings = {"server": arguments.server, "quick": arguments.quick, "jobs": extent.jobs}
    report(figures.medians, settings=settings, path=arguments.json)


async def measure(server: OwnServer, extent: Extent, figures: Figures, *, suffix: str) -> None:
    """All that one server costs. The first round warms up and is forgotten."""
    for number in range(extent.rounds + 1):
        found = figures if number else Figures()
        async with Bench.on(server, f"round-{number}") as bench:
            await measure_moves(bench, extent.jobs, found, suffix)
        print(f"  round {number} of {extent.rounds}", flush=True)
    for number in LINES:
        async with Bench.on(server, f"line-{number}") as bench:
            with timed() as run:
                line = await standing(bench, number)
            add_standing(figures, line, run, suffix)
        print(f"  {number} waiting", flush=True)


async def measure_moves(bench: Bench, count: int, figures: Figures, suffix: str) -> None:
    """One round: jobs go in, are claimed, renewed and finished."""
    few = count // 10
    singles, jobs = bench.make_jobs(few), bench.make_jobs(count, start=few)
    await figures.rate(f"submit_one_by_one_per_s{suffix}", few, bench.submit_one_by_one(singles))
    await figures.rate(f"submit_per_s{suffix}", count, bench.submit_many(jobs))
    with timed() as run:
        held = await bench.claim(count + few)
    figures.add(f"claim_per_s{suffix}", len(held) / run.seconds, run)
    with timed() as run:
        times = [await bench.renew(held[:LEASES], step) for step in range(RENEWALS)]
    for seconds in times:
        figures.add(f"renew_{LEASES}_ms{suffix}", 1000 * seconds, run)
    await figures.rate(f"finish_per_s{suffix}", len(held), bench.finish(held))


def add_standing(figures: Figures, line: Standing, run: Run, suffix: str) -> None:
    """The memory of a job is that of one in the longest line, where what else there is weighs nothing."""
    figures.add(f"claim_ms_{line.waiting}{suffix}", line.claim_ms, run)
    figures.add(f"depth_ms_{line.waiting}{suffix}", line.depth_ms, run)
    if line.waiting == max(LINES):
        figures.add(f"bytes_per_waiting_job{suffix}", line.bytes_beyond_payload, run)
        figures.add(f"bytes_per_waiting_job_with_payload{suffix}", line.bytes_in_all, run)


def compare_with_direct(requests: int, figures: Figures) -> None:
    """The engine through the queue and called directly, on the workload of `offline.py`."""
    settings = load_settings(FLAGS)
    served = build_model(settings)
    encoding = cast(Encoding, AutoTokenizer.from_pretrained(locate_embedded(settings.cache_dir)))
    pieces = make_workload(encoding, requests)
    tokens = sum(piece.num_output for piece in pieces)
    with running_queue(settings) as url:
        series = take_turns(
            {
                "direct": lambda work: run_direct(served, work),
                "queue": lambda work: asyncio.run(run_queue(url, settings.queue_name, work)),
            },
            pieces,
            tokens,
            rounds=1,
        )
    for queue, direct in zip(series["queue"].runs, series["direct"].runs, strict=True):
        noisier = max(queue, direct, key=attrgetter("foreign"))
        figures.add("queue_over_direct", direct.seconds / queue.seconds, noisier)


def print_table(measured: Sequence[Measured]) -> None:
    """A table for people: median, spread, and what the neighbours took."""
    table = Table(title="what the queue costs")
    table.add_column("figure", overflow="fold")
    for column in ("median", "least", "most", "values", "foreign CPU"):
        table.add_column(column, justify="right")
    for one in measured:
        values = (one.median, min(one.values), max(one.values))
        digits = 0 if one.median >= 100 else 3
        table.add_row(
            one.name,
            *(f"{value:,.{digits}f}" for value in values),
            str(len(one.values)),
            f"{one.foreign:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
