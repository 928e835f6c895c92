"""Worker processes for tests and benchmarks: the real command, on a model that is there at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from tiny_model import write_tiny_model
from worker_processes import WorkerProcess, WorkerProcesses, command_line

from tests.worker.factories import Place
from tidemill.jobs import Job, Status
from tidemill.params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def workers(model: Path, place: Place, tmp_path: Path) -> Iterator[WorkerProcesses]:
    flags = {"model": model, "served_model_name": place.queue, "redis_url": place.url}
    with WorkerProcesses(tmp_path, kv_cache_memory=0.05, **flags) as made:
        yield made


def echo(arguments: Sequence[str]) -> int:
    """A command that a process may run instead."""
    print(*arguments, flush=True)
    return 7


def test_a_model_of_one_seed_is_always_the_same(model: Path, tmp_path: Path) -> None:
    same, other = write_tiny_model(tmp_path / "same"), write_tiny_model(tmp_path / "other", seed=1)
    files = sorted(path.name for path in model.iterdir())
    assert [(same / name).read_bytes() for name in files] == [(model / name).read_bytes() for name in files]
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (model / weights).read_bytes()


async def test_a_worker_serves_and_stops_when_told(workers: WorkerProcesses, place: Place) -> None:
    worker = workers.start()
    await worker.ready()
    assert workers.alive == [worker]
    params = SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True)
    async with place.client() as client:
        result = await client.result(await client.submit(Job(prompt="The tide", params=params)), timeout=60)
    assert result.status is Status.SUCCEEDED
    assert worker.holds(result.worker)
    assert worker.metric("tidemill_generation_tokens_total") == 5
    assert worker.health()["held"] == 0
    with pytest.raises(KeyError):
        worker.metric("tidemill_miracles_total")

    worker.terminate()

    assert worker.wait() == 0
    assert "event=stopped" in worker.log.read_text()
    assert not worker.is_alive


async def test_a_worker_is_frozen_thawed_and_killed(workers: WorkerProcesses) -> None:
    worker = workers.start()
    await worker.ready()
    worker.freeze()
    assert psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
    with pytest.raises(TimeoutError, match="still runs"):
        worker.wait(0.01)
    worker.thaw()
    await worker.ready()
    worker.freeze()
    worker.kill()
    assert worker.wait() == -signal.SIGKILL


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[WorkerProcess]:
    """A process that has ended, and that nobody has asked about: a zombie."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield WorkerProcess(Mock(pid=process.pid), tmp_path / "worker.log", metrics_port=0)


def test_a_zombie_cannot_be_frozen(ended: WorkerProcess) -> None:
    with pytest.raises(ProcessLookupError, match="has ended"):
        ended.freeze()


def test_nor_can_a_process_that_is_gone_by_the_time_one_looks(
    ended: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, number: os.waitpid(pid, 0))
    with pytest.raises(ProcessLookupError, match="has ended"):
        ended.freeze()


@pytest.mark.parametrize("status", ["200 OK", "503 Service Unavailable"])
def test_a_worker_that_ends_amid_its_answer_does_not_answer(status: str, tmp_path: Path) -> None:
    def answer(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(f"HTTP/1.0 {status}\r\nContent-Length: 34\r\n\r\n{{".encode())

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(answer, server)
        worker = WorkerProcess(Mock(pid=1), tmp_path / "worker.log", server.getsockname()[1])
        with pytest.raises(OSError, match="amid its answer"):
            worker.health()


async def test_a_worker_that_cannot_start_says_why(workers: WorkerProcesses) -> None:
    worker = workers.start(max_num_seqs=0)
    with pytest.raises(RuntimeError, match="max_num_seqs='0'"):
        await worker.ready()
    assert worker.wait() == 2


def test_the_fork_server_has_no_thread_to_lose(workers: WorkerProcesses) -> None:
    """A lock that another thread held at the fork would never be released in the child."""
    worker = workers.start(echo)
    parent = psutil.Process(worker.pid).parent()
    assert parent is not None
    assert parent.num_threads() == 1
    assert worker.wait() == 7


def test_nothing_is_left_of_a_block_that_fails(tmp_path: Path) -> None:
    started: list[WorkerProcess] = []

    def fail() -> None:
        with WorkerProcesses(tmp_path, command=_sleep) as workers:
            started.append(workers.start())
            started[0].freeze()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert started[0].wait(0) == -signal.SIGKILL


def _sleep(arguments: Sequence[str]) -> int:
    signal.pause()
    return 0


def test_each_process_has_flags_a_log_and_a_port_of_its_own(tmp_path: Path) -> None:
    with WorkerProcesses(tmp_path, command=echo, lease=2.0, queue="q") as workers:
        first, second = workers.start(lease=3.0), workers.start()
        assert (first.wait(), second.wait()) == (7, 7)
    words = [worker.log.read_text().split() for worker in (first, second)]
    assert words[0] == [
        *("worker", "--threads=1", "--lease=3.0", "--queue=q", f"--metrics-port={first.metrics_port}")
    ]
    assert words[1][2] == "--lease=2.0"
    assert first.metrics_port != second.metrics_port


def test_the_environment_of_the_caller_stays_as_it_is(tmp_path: Path) -> None:
    before = dict(os.environ)
    with WorkerProcesses(tmp_path):
        assert dict(os.environ) == before


def test_flags_are_spelled_as_the_command_has_them() -> None:
    flags = {"max_num_seqs": 4, "enable_prefix_caching": False, "enable_chunked_prefill": True}
    assert command_line(flags) == [
        "--max-num-seqs=4",
        "--no-enable-prefix-caching",
        "--enable-chunked-prefill",
    ]
