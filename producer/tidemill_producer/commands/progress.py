"""A count of what was done so far, on standard error, for people only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def progress(done: str) -> Iterator[Callable[[], None]]:
    """Shows "<n> <done>"; yields what to call for each one.

    Silent unless a terminal is watching, and on one that the data itself scrolls over.
    """
    columns = (SpinnerColumn(), TextColumn(f"{{task.completed:.0f}} {done}"), TimeElapsedColumn())
    silent = sys.stdout.isatty() or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False, disable=silent) as bar:
        task = bar.add_task(done, total=None)
        yield lambda: bar.advance(task)
