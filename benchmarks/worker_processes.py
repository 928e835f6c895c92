"""Worker processes that start in a fraction of a second, and can be killed, frozen and watched.

Each is forked from one process that has imported what a worker needs and runs nothing: no thread of it
is ever lost in a fork. It runs the real command, `tidemill worker`, on one compute thread.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 60.0
STOP_SECONDS = 30.0
POLL_INTERVAL = 0.02
HTTP_SECONDS = 10.0
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
"""States of a process that no signal reaches any more."""

PRELOADED = (
    "structlog",
    "tidemill_worker.commands",
    "tidemill_worker.app",
    "tidemill_worker.model.architecture",
    "tidemill_worker.model.checkpoint",
    "tidemill_worker.model.device",
    "tidemill_worker.model.kv_cache",
    "tidemill_worker.model.loader",
    "tidemill_worker.model.runner",
    "transformers.models.llama.modeling_llama",
)
"""All that a worker imports, some of it inside functions, and the model class of the tiny model."""
ENVIRONMENT = {
    # Read where OpenMP and the BLAS libraries are loaded, which would start their threads.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

Command = Callable[[Sequence[str]], int]
"""A function of a module that can be imported, as `tidemill.__main__.main`: it takes a command line."""


def run_worker(arguments: Sequence[str]) -> int:
    """The real command; returns its exit status."""
    from tidemill.__main__ import main

    return main(arguments)


@dataclass(frozen=True)
class WorkerProcess:
    """One worker process; its log is a file, so that it never waits for somebody who reads it."""

    process: BaseProcess
    log: Path
    metrics_port: int

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def holds(self, name: str | None) -> bool:
        """Whether `name`, as the queue knows it, is the one that this process gave itself."""
        return name is not None and name.rsplit("-", 2)[1:2] == [str(self.pid)]

    async def ready(self, timeout: float = START_SECONDS) -> None:
        """Return once the model is loaded.

        Raises:
            RuntimeError: the process has ended instead; with its log.
            TimeoutError: it takes too long.
        """
        async with asyncio.timeout(timeout):
            while not await asyncio.to_thread(self._is_healthy):
                if not self.is_alive:
                    raise RuntimeError(self.log.read_text())
                await asyncio.sleep(POLL_INTERVAL)

    def _is_healthy(self) -> bool:
        try:
            return self.health()["ok"] is True
        except OSError:  # not listening yet, or any more
            return False

    def health(self) -> Mapping[str, Any]:
        """What /health tells, well or not.

        Raises:
            OSError: the process does not answer.
        """
        told: Mapping[str, Any] = json.loads(self._get("/health"))
        return told

    def metric(self, name: str) -> float:
        """The value of `name` as /metrics has it (`_total` is part of a counter's), summed over its labels.

        Raises:
            OSError: the process does not answer.
            KeyError: there is no such metric.
        """
        families = text_string_to_metric_families(self._get("/metrics"))
        values = [s.value for family in families for s in family.samples if s.name == name]
        if not values:
            raise KeyError(name)
        return float(sum(values))

    def _get(self, path: str) -> str:
        try:
            with self._open(path) as response:
                return str(response.read().decode())
        except http.client.HTTPException as error:
            raise OSError(f"worker {self.pid} has ended amid its answer") from error

    def _open(self, path: str) -> Any:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=HTTP_SECONDS)
        except urllib.error.HTTPError as refusal:  # 503: not healthy, and the body says why
            return refusal

    def kill(self) -> None:
        """SIGKILL: what has not been said by now never will be."""
        self.process.kill()
        self.process.join()

    def terminate(self) -> None:
        """SIGTERM, as its supervisor would send it."""
        self.process.terminate()

    def freeze(self) -> None:
        """Return once it computes and says nothing, until `thaw`; the server keeps its connections.

        Raises:
            ProcessLookupError: it has ended.
        """
        os.kill(self.pid, signal.SIGSTOP)
        while (status := self._status()) != psutil.STATUS_STOPPED:
            if status in ENDED:
                raise ProcessLookupError(f"worker {self.pid} has ended")
            time.sleep(0.001)

    def _status(self) -> str:
        try:
            return psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return psutil.STATUS_DEAD

    def thaw(self) -> None:
        """Let it go on.

        Raises:
            ProcessLookupError: it has ended.
        """
        os.kill(self.pid, signal.SIGCONT)

    def wait(self, timeout: float = STOP_SECONDS) -> int:
        """The exit status, negative for the signal that ended it.

        Raises:
            TimeoutError: it still runs.
        """
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutError(f"worker {self.pid} still runs after {timeout:g} s; its log is {self.log}")
        return self.process.exitcode


class WorkerProcesses:
    """Starts workers; at the end of the block none is left.

    Args:
        folder: for their logs.
        command: what each process runs, unless `start` says otherwise.
        flags: of every worker, by the names of its settings.
    """

    def __init__(self, folder: Path, *, command: Command = run_worker, **flags: object) -> None:
        self.started: list[WorkerProcess] = []
        self._folder = folder
        self._command = command
        self._flags = {"threads": 1, **flags}
        self._context = multiprocessing.get_context("forkserver")

    def __enter__(self) -> Self:
        self._context.set_forkserver_preload(list(PRELOADED))
        with _environment(ENVIRONMENT):
            forkserver.ensure_running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self.alive:
            worker.kill()

    @property
    def alive(self) -> list[WorkerProcess]:
        """Those that have not ended, frozen ones included; in the order in which they were started."""
        return [worker for worker in self.started if worker.is_alive]

    def start(self, command: Command | None = None, **flags: object) -> WorkerProcess:
        """Start one, and do not wait for it; `flags` are added to those that all have."""
        port = free_port()
        arguments = ["worker", *command_line({**self._flags, "metrics_port": port, **flags})]
        log = self._folder / f"worker-{len(self.started)}.log"
        log.touch()  # a process that is killed at once leaves an empty one
        process = self._context.Process(
            target=_work, args=(command or self._command, arguments, log), daemon=True
        )
        process.start()
        worker = WorkerProcess(process, log, port)
        self.started.append(worker)
        return worker


def command_line(flags: Mapping[str, object]) -> list[str]:
    """Settings by their names, as the command takes them."""
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={value}")
    return words


def _work(command: Command, arguments: Sequence[str], log: Path) -> None:
    """The process."""
    with log.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    sys.exit(command(arguments))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
