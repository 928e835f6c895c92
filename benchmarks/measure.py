"""Timing that says what else the machine was doing, and figures that stay comparable."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table


@dataclass
class Run:
    """One timed run: wall seconds, and the share of the machine that others used meanwhile."""

    seconds: float = 0.0
    foreign: float = 0.0


@contextmanager
def timed() -> Iterator[Run]:
    """Time a block; CPU time of this process and its children counts as its own."""
    run = Run()
    own, busy, start = _own_seconds(), _busy_seconds(), time.perf_counter()
    yield run
    run.seconds = time.perf_counter() - start
    used_by_others = (_busy_seconds() - busy) - (_own_seconds() - own)
    run.foreign = max(0.0, used_by_others / (run.seconds * (os.cpu_count() or 1)))


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _own_seconds() -> float:
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


@dataclass
class Series:
    """The runs of one contender."""

    name: str
    tokens: int
    """Output tokens of one run."""
    runs: list[Run] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Output tokens per second of each run."""
        return [self.tokens / run.seconds for run in self.runs]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def machine() -> dict[str, object]:
    """What the figures depend on besides the code."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "omp": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_"))},
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str:
    """The commit measured, marked if the tree has changes on top of it."""
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def benchmark_parser(description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """A parser with the flags that most benchmarks have; `quick` says what `--quick` does."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="write commit, machine, settings and figures here")
    return parser


def print_series(title: str, series: Sequence[Series]) -> None:
    """A table for people: median, spread, and what the neighbours took."""
    table = Table(title=title)
    for column in ("contender", "tokens/s", "least", "most", "runs", "foreign CPU"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for one in series:
        foreign = max(run.foreign for run in one.runs)
        table.add_row(
            one.name,
            f"{one.rate:.1f}",
            f"{min(one.rates):.1f}",
            f"{max(one.rates):.1f}",
            str(len(one.runs)),
            f"{foreign:.0%}",
        )
    Console().print(table)


def report(figures: Mapping[str, float], *, settings: Mapping[str, object], path: Path | None) -> None:
    """Print the figures by name and, if asked, write them where a program can read them."""
    about, revision = machine(), commit()
    for name, value in figures.items():
        print(f"{name} = {value:.3f}")
    print(f"commit {revision}; {about}")
    if path is not None:
        document = {
            "commit": revision,
            "machine": about,
            "settings": dict(settings),
            "figures": dict(figures),
        }
        path.write_text(json.dumps(document, indent=2) + "\n")
