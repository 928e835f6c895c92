"""What one step costs besides the model: the scheduler alone, and the engine around a model of no time.

    python benchmarks/scheduling.py [--quick] [--json PATH]

A steady state: so many sequences run, so many wait, and whoever ends is replaced. The goal is at most
a millisecond with 256 running, and no growth with the number waiting; so those that differ in it
alone take turns. As in a worker, Python's garbage collector is on, and what was there before the
first request is kept out of its sight; its pauses are in the mean and in the most, not in the median.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from measure import Run, benchmark_parser, report, timed
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from standing_load import EngineLoad, Load, SchedulerLoad, settle

RUNNING = (16, 64, 256)
WAITING = (300, 10_000, 100_000)
TURN = 50
"""Steps that a contender takes before the next one's turn."""


@dataclass
class Timing:
    """The steps of one contender."""

    name: str
    microseconds: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    """Sequences that ran, step by step."""
    preemptions: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.microseconds)


def main() -> None:
    arguments = benchmark_parser(__doc__, quick="300 steps of each instead of 2,000").parse_args()
    rounds = 6 if arguments.quick else 40
    gc.collect()
    gc.freeze()
    timings: list[Timing] = []
    with timed() as run:
        for contenders in groups():
            timings += measure(contenders, rounds)
    print_table(timings, run)
    figures = {timing.name: timing.median for timing in timings}
    report(
        figures,
        settings={"steps": rounds * TURN, "turn": TURN, "quick": arguments.quick},
        path=arguments.json,
    )


def groups() -> Iterator[list[Callable[[], Load]]]:
    """Contenders that are compared with each other; only one group's are in memory at a time."""
    for running in RUNNING:
        yield [partial(SchedulerLoad, running, waiting) for waiting in WAITING]
    ends = (WAITING[0], WAITING[-1])
    yield [partial(SchedulerLoad, RUNNING[-1], waiting, scarce=True) for waiting in ends]
    yield [partial(EngineLoad, RUNNING[-1], waiting) for waiting in ends]


def measure(contenders: Sequence[Callable[[], Load]], rounds: int) -> list[Timing]:
    """Bring all to their steady state, then let them take turns, forwards and backwards."""
    loads = [make() for make in contenders]
    for load in loads:
        settle(load)
    timings = [Timing(load.name, preemptions=-load.scheduler.counters.num_preemptions) for load in loads]
    pairs = list(zip(loads, timings, strict=True))
    gc.collect()
    for number in range(rounds):
        for load, timing in pairs[:: 1 if number % 2 else -1]:
            take_turn(load, timing)
    for load, timing in pairs:
        timing.preemptions += load.scheduler.counters.num_preemptions
    return timings


def take_turn(load: Load, timing: Timing) -> None:
    for _ in range(TURN):
        timing.microseconds.append(1e6 * load.step())
        timing.running.append(load.scheduler.num_running)


def print_table(timings: Sequence[Timing], run: Run) -> None:
    title = f"microseconds of a step; others used {run.foreign:.0%} of the machine"
    table = Table(title=title, box=SIMPLE, pad_edge=False)
    for column in ("", "median", "mean", "P99", "most", "running", "victims"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for timing in timings:
        times = timing.microseconds
        spread = (timing.median, statistics.mean(times), float(np.percentile(times, 99)), max(times))
        running = f"{statistics.mean(timing.running):.0f}"
        table.add_row(timing.name, *(f"{value:.0f}" for value in spread), running, str(timing.preemptions))
    Console().print(table)


if __name__ == "__main__":
    main()
