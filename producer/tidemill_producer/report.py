"""What people and programs see of a run of summaries."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidemill.errors import TidemillError
from tidemill_producer.commands.options import complain, print_json
from tidemill_producer.documents import STDIN
from tidemill_producer.summary import Failure, Summary, Tally

SUMMARY_SUFFIX = ".summary.txt"


class Report:
    """Prints outcomes as they come, and at the end what the run took.

    Summaries go to standard output or to files; failures and the bar go to standard error, the bar
    only if a terminal is there.
    """

    def __init__(self, folder: Path | None, *, as_json: bool) -> None:
        """`folder` is where the summaries are written; `None` prints them."""
        self.folder = folder
        self.num_summarized = 0
        self.num_failed = 0
        self._as_json = as_json
        self._total = Tally()
        self._seconds = 0.0
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("documents"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    @contextmanager
    def running(self, num_documents: int) -> Iterator[None]:
        """Shows the bar, and measures the time, while documents are summarized."""
        self._bar.update(self._task, total=num_documents)
        begin = time.monotonic()
        try:
            with self._bar:
                yield
        finally:
            self._seconds = time.monotonic() - begin

    def progressed(self, total: Tally) -> None:
        """Some job was answered; `total` is what was done so far."""
        self._total = total
        self._bar.update(self._task, description=f"{total.jobs} parts, {total.completion_tokens} tokens")

    def tell(self, outcome: Summary | Failure) -> None:
        """A document is done with.

        Raises:
            TidemillError: its summary could not be written.
        """
        self._bar.advance(self._task)
        if isinstance(outcome, Summary):
            self.num_summarized += 1
            self._tell_summary(outcome)
        else:
            self.num_failed += 1
            self._tell_failure(outcome)

    def conclude(self) -> None:
        """The last line: standard output for people, standard error beside JSON."""
        print(self._last_line(), file=sys.stderr if self._as_json else sys.stdout, flush=True)

    def _tell_summary(self, summary: Summary) -> None:
        path = self._write(summary, self.folder) if self.folder else None
        if self._as_json:
            place = {"path": str(path)} if path else {}
            line = {"document": summary.name, "status": "succeeded", "summary": summary.text, **place}
            print_json(line | asdict(summary.tally))
        elif path:
            print(f"{summary.name} -> {path}", flush=True)
        else:
            print(f"# {summary.name}\n\n{summary.text}\n", flush=True)

    def _tell_failure(self, failure: Failure) -> None:
        if self._as_json:
            print_json({"document": failure.name, "status": "failed", "error": failure.reason})
        else:
            complain(f"{failure.name}: {failure.reason}")

    def _write(self, summary: Summary, folder: Path) -> Path:
        """Whole or not at all, under the document's own path inside the folder."""
        name = "stdin" if summary.name == STDIN else summary.name
        inside = ["_" if part == os.pardir else part for part in Path(name).parts if part != os.sep]
        path = folder.joinpath(*inside)
        path = path.with_name(path.name + SUMMARY_SUFFIX)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".part")
            partial.write_text(summary.text + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise TidemillError(f"cannot write {path}: {error.strerror or error}") from error
        return path

    def _last_line(self) -> str:
        total = self._total
        speed = (total.completion_tokens - total.reused_tokens) / max(self._seconds, 1e-9)
        parts = [
            _counted(self.num_summarized, "document"),
            _counted(total.chunks, "chunk"),
            _counted(total.prompt_tokens + total.completion_tokens, "token")
            + f" ({total.prompt_tokens} in, {total.completion_tokens} out)",
            f"{speed:.1f} tokens/s",
        ]
        if self.num_failed:
            parts.insert(1, f"{self.num_failed} failed")
        if total.reused_jobs:
            parts.append(f"{total.reused_jobs} of {total.jobs} jobs from an earlier run")
        return ", ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
