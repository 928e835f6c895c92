"""Workers and commands as an operator starts them: processes of their own, on the real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.polling import until
from tests.processes import confined
from tests.tidemill.servers import free_port
from tidemill.jobs import Result

START_SECONDS = 60.0
STOP_SECONDS = 30.0


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tidemill", *arguments]


def run_command(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    folder: Path | None = None,
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command_line(*arguments),
        env={**os.environ, **(environment or {})},
        input=stdin,
        cwd=folder,
        capture_output=True,
        timeout=timeout,
        check=False,
    )


@dataclass
class Worker:
    """A worker process; its log is a file, so that it never waits for somebody who reads it."""

    process: subprocess.Popen[bytes]
    log: Path
    metrics_port: int

    async def ready(self) -> None:
        await until(self._is_healthy, timeout=START_SECONDS)

    def _is_healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            with self._get("/health") as response:
                return response.status == HTTPStatus.OK
        except OSError:  # not listening yet, or still loading
            return False

    def metric(self, name: str) -> float:
        """The value of `name`, which has one sample."""
        with self._get("/metrics") as response:
            text: str = response.read().decode()
        families = text_string_to_metric_families(text)
        (sample,) = [s for family in families for s in family.samples if s.name == name]
        return float(sample.value)

    def health(self, detail: str) -> object:
        """One of the details that /health tells."""
        with self._get("/health") as response:
            return json.load(response)[detail]

    def did(self, result: Result) -> bool:
        """Whether this process recorded the result."""
        return self.holds(result.worker)

    def holds(self, name: str | None) -> bool:
        """Whether `name`, as the queue knows it, is this process's."""
        return name is not None and name.rsplit("-", 2)[1] == str(self.process.pid)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        self.process.terminate()

    def pause(self) -> None:
        """Until `go_on`, it computes nothing and claims nothing."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # returns once it has stopped

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def ended(self) -> int:
        """The exit status, which must come soon."""
        return self.process.wait(STOP_SECONDS)

    def _get(self, path: str) -> HTTPResponse:
        url = f"http://127.0.0.1:{self.metrics_port}{path}"
        response: HTTPResponse = urllib.request.urlopen(url, timeout=10)
        return response


@contextmanager
def worker_process(model: Path, url: str, queue: str, folder: Path, **flags: object) -> Iterator[Worker]:
    """A worker that serves `queue`; when the block ends, so does the process."""
    port = free_port()
    values = {
        "model": model,
        "served_model_name": queue,
        "redis_url": url,
        "metrics_port": port,
        "cache_dir": folder,
        **flags,
    }
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    log = folder / f"worker-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command_line("worker", *arguments), stdout=output, stderr=output)
    with confined(process):
        yield Worker(process, log, port)
