"""SIGTERM and SIGINT at any moment of a worker's life: it ends by itself, and with status 0."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import confined
from tests.tidemill.servers import Server, free_port
from tests.worker.factories import make_tokenizer
from tests.worker.model.factories import make_tiny_llama
from tidemill_worker.signals import STOPS, StopSignals, catch_stop_signals

CATCHING = "from tidemill_worker.signals import catch_stop_signals\nsignals = catch_stop_signals()\n"
WORKER = (sys.executable, "-m", "tidemill", "worker", "--metrics-port", "0")
SIGNALS = pytest.mark.parametrize("number", STOPS, ids=[number.name for number in STOPS])


@pytest.fixture
def signals() -> StopSignals:
    return catch_stop_signals()


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    with confined(
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    ) as started:
        yield started


def program(text: str) -> tuple[str, str, str]:
    """One that has caught the signals says so."""
    return sys.executable, "-c", CATCHING + textwrap.dedent(text)


def catches_signals(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    return all(caught >> (number - 1) & 1 for number in STOPS)


def await_handlers(worker: subprocess.Popen[str], pid: int | None = None) -> None:
    deadline = time.monotonic() + 30
    while not catches_signals(pid or worker.pid):
        assert worker.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def silent_server() -> Iterator[str]:
    """The URL of a Redis that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


@SIGNALS
def test_a_service_is_told_of_every_signal(signals: StopSignals, number: signal.Signals) -> None:
    heard: list[int] = []
    signals.pass_to(lambda: heard.append(1))
    for count in (1, 2):
        os.kill(os.getpid(), number)
        assert len(heard) == count
    signals.ignore()
    os.kill(os.getpid(), number)
    assert len(heard) == 2


def test_they_are_caught_once(signals: StopSignals) -> None:
    assert catch_stop_signals() is signals


SWALLOWING = """
    import time
    while True:
        try:
            print("caught", flush=True)
            time.sleep(60)
        except BaseException:
            pass
"""
FINALIZING = """
    import time

    class Finalized:
        def __del__(self):
            print("caught", flush=True)
            time.sleep(60)

    Finalized()
    time.sleep(60)
"""
CALLED_BACK = """
    import ctypes, time

    @ctypes.CFUNCTYPE(None)
    def called_back():
        print("caught", flush=True)
        time.sleep(60)

    called_back()
    time.sleep(60)
"""


@SIGNALS
@pytest.mark.parametrize("amid", [SWALLOWING, FINALIZING, CALLED_BACK])
def test_a_start_ends_at_the_first_signal_whatever_it_is_about(number: signal.Signals, amid: str) -> None:
    """None of these would hand on an exception; and nobody needs to read of a stop that was asked for."""
    with process(*program(amid)) as stubborn:
        assert stubborn.stdout is not None and stubborn.stdout.readline() == "caught\n"
        stubborn.send_signal(number)
        output, errors = stubborn.communicate(timeout=30)
        assert (stubborn.returncode, output, errors) == (0, "", "")


def test_what_was_printed_before_is_seen() -> None:
    printing = 'import os, signal; print("printed"); os.kill(os.getpid(), signal.SIGTERM)'
    with process(*program(printing)) as ended:
        assert ended.communicate(timeout=30) == ("printed\n", "")


@SIGNALS
def test_signals_after_the_end_do_no_harm(number: signal.Signals) -> None:
    ending = """
        import os, time
        signals.ignore()
        print("ignored", flush=True)
        os.read(0, 1)
    """
    with process(*program(ending)) as ended:
        assert ended.stdout is not None and ended.stdout.readline() == "ignored\n"
        for _ in range(3):
            ended.send_signal(number)
        output, errors = ended.communicate("x", timeout=30)
        assert (ended.returncode, output, errors) == (0, "", "")


@SIGNALS
def test_a_worker_that_waits_for_redis_ends_at_once(number: signal.Signals) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    with process(*WORKER, "--redis-url", url, "--redis-wait", "600") as worker:
        await_handlers(worker)
        time.sleep(random.uniform(0.0, 1.5))
        worker.send_signal(number)
        assert worker.wait(30) == 0
        assert worker.stderr is not None and worker.stderr.read() == ""


def test_a_worker_ends_at_any_instant_of_its_start() -> None:
    """While it imports, reads its settings, or talks to a Redis that does not answer."""
    with silent_server() as url:
        for _ in range(6):
            with process(*WORKER, "--redis-url", url) as worker:
                await_handlers(worker)
                time.sleep(random.uniform(0.0, 1.0))
                worker.send_signal(signal.SIGTERM)
                assert worker.wait(30) == 0
                assert worker.stderr is not None and worker.stderr.read() == ""


def test_a_worker_ends_at_any_instant_of_its_loading(valkey: Server, tmp_path: Path) -> None:
    """While it imports torch, reads the model, warms it up, or has just begun to serve."""
    folder = make_tiny_llama(tmp_path / "model", vocab_size=make_tokenizer().vocab_size)
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    flags = ("--redis-url", valkey.url, "--model", str(folder), "--kv-cache-memory", "0.01", "--threads", "1")
    for _ in range(3):
        with process(*WORKER, *flags, "--log-level", "error") as worker:
            await_handlers(worker)
            time.sleep(random.uniform(1.0, 6.0))
            worker.send_signal(signal.SIGTERM)
            _, errors = worker.communicate(timeout=60)
            assert (worker.returncode, errors) == (0, "")


def can_unshare() -> bool:
    command = shutil.which("unshare")
    return command is not None and subprocess.run([command, *NAMESPACE, "true"], check=False).returncode == 0


NAMESPACE = ("--fork", "--pid", "--map-root-user") if os.getuid() else ("--fork", "--pid")


@pytest.mark.skipif(not can_unshare(), reason="no PID namespaces here")
def test_a_worker_that_is_pid_1_hears_of_them() -> None:
    """The kernel has no default action for it: `docker stop` would wait for its SIGKILL."""
    with (
        silent_server() as url,
        process("unshare", *NAMESPACE, "--kill-child", *WORKER, "--redis-url", url) as unshare,
    ):
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
        while not children.read_text():
            assert unshare.poll() is None
        pid = int(children.read_text())
        await_handlers(unshare, pid)
        os.kill(pid, signal.SIGTERM)
        assert unshare.wait(30) == 0
