"""The demo: a real queue, one real worker, and summaries of documents nobody here wrote."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from tidemill.client import Client
from tidemill.errors import QueueUnavailable, TidemillError
from tidemill_worker.embedded import embedded_valkey
from tidemill_worker.settings import WorkerSettings

MIN_CHARACTERS, MAX_CHARACTERS = 1_500, 8_000
"""Descriptions worth summarizing, and short enough that a dozen take minutes on two cores."""
START_SECONDS = 600.0
"""Time for the worker to come up; the first start converts the model."""
STOP_SECONDS = 20.0
LEASE = 5.0
"""Short, so that a demo that was killed goes on soon after it is started again."""


def run_demo(settings: WorkerSettings, *, packages: int, fresh: bool) -> int:
    """Start queue and worker, summarize, and stop both.

    Returns:
        The exit status of `tidemill summarize`.

    Raises:
        TidemillError: the queue or the worker could not be started.
    """
    folder = settings.cache_dir / "demo"
    with (
        _termination_raises(),
        tempfile.TemporaryDirectory(prefix="tidemill-demo-") as documents,
        embedded_valkey(folder, fresh=fresh) as url,
        _worker(settings, url) as worker,
    ):
        _write_descriptions(Path(documents), packages)
        _await_worker(worker, url, settings.queue_name)
        command = [*_tidemill("summarize"), ".", "--queue", settings.queue_name, "--redis-url", url]
        with _process(command, cwd=documents) as summarize:
            return _outcome(summarize, worker)


def package_descriptions(count: int) -> dict[str, str]:
    """Long descriptions of `count` installed packages, by name: the same ones at every call."""
    found: dict[str, str] = {}
    for distribution in distributions():
        metadata = distribution.metadata.json
        text = str(metadata.get("description", "")).strip()
        if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
            found[str(metadata["name"])] = text
    return dict(sorted(found.items(), key=lambda item: item[0].lower())[:count])


def _write_descriptions(folder: Path, count: int) -> None:
    for name, text in package_descriptions(count).items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def _tidemill(command: str) -> list[str]:
    return [sys.executable, "-m", "tidemill", command]


@contextmanager
def _worker(settings: WorkerSettings, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a session of its own: Ctrl-C reaches us alone, and we stop it before the queue."""
    flags = {
        "--redis-url": url,
        "--model": settings.model,
        "--queue": settings.queue_name,
        "--served-model-name": settings.model_name,
        "--cache-dir": str(settings.cache_dir),
        "--lease": str(LEASE),
        "--metrics-port": "0",
        "--log-level": "warning",
    }
    if settings.threads is not None:
        flags["--threads"] = str(settings.threads)
    arguments = [word for flag in flags.items() for word in flag]
    with _process([*_tidemill("worker"), *arguments], new_session=True) as process:
        try:
            yield process
        finally:
            _release(process)


@contextmanager
def _process(
    command: Sequence[str], *, cwd: str | None = None, new_session: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block."""
    process = subprocess.Popen(command, cwd=cwd, start_new_session=new_session)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _release(process: subprocess.Popen[bytes]) -> None:
    """Two signals: the worker checkpoints and hands its jobs back at once."""
    for _ in range(2):
        if process.poll() is None:
            process.terminate()
            time.sleep(0.2)


def _await_worker(worker: subprocess.Popen[bytes], url: str, queue: str) -> None:
    """Return once the queue is served."""
    console = Console(stderr=True)
    deadline = time.monotonic() + START_SECONDS
    with console.status("Loading the model (the first time, it is converted first) ..."):
        while not asyncio.run(_is_served(url, queue)):
            _check_running(worker)
            if time.monotonic() > deadline:
                raise QueueUnavailable(f"the worker was not ready within {START_SECONDS:g} s")
            time.sleep(0.3)


def _outcome(summarize: subprocess.Popen[bytes], worker: subprocess.Popen[bytes]) -> int:
    """The exit status of `summarize`, which would wait for ever for a worker that is gone."""
    while True:
        try:
            return summarize.wait(1.0)
        except subprocess.TimeoutExpired:
            _check_running(worker)


def _check_running(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is not None:
        raise TidemillError(f"the worker ended with status {worker.returncode}")


async def _is_served(url: str, queue: str) -> bool:
    async with Client(url, queue=queue) as client:
        return await client.model_card() is not None


@contextmanager
def _termination_raises() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that nothing is left running."""

    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
