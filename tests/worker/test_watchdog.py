"""An engine that makes no progress, and a stop that does not end, end the process; nothing else does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from tests.processes import confined
from tests.worker.factories import (
    FakeEngine,
    Place,
    RunningWorker,
    eventually,
    make_job,
    make_stats,
    make_tokenizer,
    opener,
    running_worker,
)
from tests.worker.hanging import HangingEngine
from tests.worker.model.factories import make_tiny_llama
from tidemill.client import Client
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Job
from tidemill.moves import JobState
from tidemill.params import SamplingParams
from tidemill.registry import WorkerState
from tidemill_worker.engine import EngineStats
from tidemill_worker.engine_thread import EngineThread
from tidemill_worker.health import HealthProbe
from tidemill_worker.request import Request
from tidemill_worker.watchdog import LOOKS, Watchdog, stacks

STALL = 0.2
"""Seconds without progress that are one in these tests."""


@dataclass
class Patient:
    """A service, and its engine, that say of themselves what a test wants."""

    stuck_seconds: float = 0.0
    plans_nothing: bool = False
    has_died: bool = False
    num_unrecorded: int = 0
    stop_by: float | None = None
    has_ended_well: bool = False
    stats: EngineStats = field(default_factory=make_stats)
    stalled: threading.Event = field(default_factory=threading.Event)

    @property
    def engine(self) -> Any:
        return self

    def stall(self) -> None:
        self.stalled.set()


class WithEngine(Patient):
    """A service that says so, of an engine that is real."""

    def __init__(self, engine: EngineThread) -> None:
        super().__init__()
        self._engine = engine

    @property
    def engine(self) -> Any:
        return self._engine


class Exit:
    """What stands in for the end of the process."""

    def __init__(self) -> None:
        self.status: ExitCode | None = None
        self._ended = threading.Event()

    def __call__(self, status: ExitCode) -> None:
        self.status = status
        self._ended.set()

    def wait(self, timeout: float = 10.0) -> bool:
        return self._ended.wait(timeout)


@contextmanager
def watching(service: Any, *, stall_timeout: float = STALL) -> Iterator[Exit]:
    terminate = Exit()
    with Watchdog(service, stall_timeout=stall_timeout, terminate=terminate):
        yield terminate


async def assert_stalls(
    worker: RunningWorker, client: Client, place: Place, exit: Exit, logs: list[Any], job: Job
) -> dict[str, Any]:
    """The worker says so everywhere, lets the job's lease run out, and ends; returns what it has logged."""
    await eventually(lambda: exit.status is not None)
    assert exit.status is ExitCode.STALLED
    probe = HealthProbe()
    probe.service = worker.service
    assert (probe().ok, probe().details["engine"]) == (False, "stalled")
    await eventually(lambda: not worker.service._leases._thread.is_alive())
    async with opener(place)() as queue:
        await eventually_reported(queue, WorkerState.STALLED)
    assert (await client.status(job.id)).state is JobState.RUNNING
    [event] = [entry for entry in logs if entry["event"] == "engine_stalled"]
    return dict(event)


async def eventually_reported(queue: Any, state: WorkerState) -> None:
    deadline = time.monotonic() + 10
    while [view.report.state for view in await queue.workers()] != [state]:
        assert time.monotonic() < deadline


async def test_a_step_that_hangs_ends_the_process(place: Place, client: Client) -> None:
    """Given a result that is ready and a job that hangs, then the one is recorded and the other's lease is
    let go, so that the attempt counts."""
    done, job = make_job("Mill"), make_job("Tide", params={"max_tokens": 50})
    engine = HangingEngine(hangs=False)
    with capture_logs() as logs:
        async with running_worker(place, engine=engine) as worker:
            with watching(worker.service) as exit:
                await client.submit(done)
                await client.result(done.id, timeout=10)
                engine.hangs = True
                await client.submit(job)
                event = await assert_stalls(worker, client, place, exit, logs, job)
    assert event["log_level"] == "error"
    assert event["reason"].startswith("a step has not returned for ")
    assert event["steps"] == done.params.max_tokens
    assert "tidemill-engine:" in event["stacks"]
    assert "self.let_go.wait()" in event["stacks"]


async def test_an_engine_that_plans_nothing_ends_the_process(place: Place, client: Client) -> None:
    """Requests wait, none runs, and every thread is well (vllm#45414)."""
    job = make_job()
    engine = FakeEngine(paced=True)
    with capture_logs() as logs:
        async with running_worker(place, engine=engine) as worker:
            with watching(worker.service) as exit:
                await client.submit(job)
                event = await assert_stalls(worker, client, place, exit, logs, job)
    assert event["reason"].startswith("nothing was computed of what waits for ")


def test_an_engine_thread_that_vanishes_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No failure was reported: it was not an `Exception` that ended it."""
    monkeypatch.setattr("threading.excepthook", lambda _: None)

    def vanish(outputs: object) -> NoReturn:
        raise SystemExit

    engine = EngineThread(FakeEngine(), deliver=vanish, on_failure=lambda: None)
    service = WithEngine(engine)
    with watching(service) as exit:
        assert not engine.has_died
        engine.start()
        engine.submit(Request("a", [1], SamplingParams(), 0, []))
        assert exit.wait()
    assert (exit.status, service.stalled.is_set()) == (ExitCode.STALLED, True)


def test_results_are_recorded_first_but_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Patient(stuck_seconds=100.0, num_unrecorded=1)
    with watching(waiting) as exit:
        assert waiting.stalled.wait(10)
        assert not exit.wait(0.3)
        waiting.num_unrecorded = 0
        assert exit.wait()

    monkeypatch.setattr("tidemill_worker.watchdog.RECORDING_TIME", 0.2)
    with watching(Patient(stuck_seconds=100.0, num_unrecorded=1)) as exit:
        assert exit.wait()
    assert exit.status is ExitCode.STALLED


def test_a_stalled_process_that_records_results_shows_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one whose stalls are short would be ended for want of it, with the wrong status."""
    shown: list[float] = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda timeout, exit: shown.append(timeout))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: None)
    waiting, terminate = Patient(stuck_seconds=100.0, num_unrecorded=1), Exit()
    with Watchdog(waiting, stall_timeout=STALL, terminate=terminate, hang_timeout=2 * STALL):
        assert waiting.stalled.wait(10)
        num_shown, deadline = len(shown), time.monotonic() + 10
        while len(shown) < num_shown + 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        waiting.num_unrecorded = 0
        assert terminate.wait()
    assert terminate.status is ExitCode.STALLED


def test_the_process_ends_though_it_cannot_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a log that nobody can write to any more."""

    def fail() -> NoReturn:
        raise BrokenPipeError

    monkeypatch.setattr("tidemill_worker.watchdog.stacks", fail)
    monkeypatch.setattr("threading.excepthook", lambda *_: None)
    with watching(Patient(stuck_seconds=100.0)) as exit:
        assert exit.wait()


def test_slow_steps_are_no_stall() -> None:
    """Each takes almost as long as it may."""
    patient = Patient()
    with watching(patient) as exit:
        for _ in range(5):
            for looks in range(LOOKS - 4):
                patient.stuck_seconds = looks * STALL / LOOKS
                time.sleep(STALL / LOOKS)
            patient.stuck_seconds = 0.0
        assert not exit.wait(0)


def test_a_process_that_was_frozen_did_not_stall() -> None:
    """Given a step that by the clock has gone on for an hour, of which this process has seen an instant."""
    patient = Patient(stuck_seconds=3600.0)
    with watching(patient, stall_timeout=10.0) as exit:
        assert not exit.wait(0.7)
        patient.stuck_seconds = 0.0
    assert exit.status is None


@pytest.mark.parametrize(("has_ended_well", "status"), [(False, ExitCode.FAILED), (True, ExitCode.OK)])
def test_a_stop_that_does_not_end_is_ended(has_ended_well: bool, status: ExitCode) -> None:
    """Well, if all that is missing is the end of a thread."""
    patient = Patient(stop_by=time.monotonic() + 0.2, has_ended_well=has_ended_well)
    with capture_logs() as logs, watching(patient, stall_timeout=1.0) as exit:
        assert exit.wait()
    assert exit.status is status
    assert not patient.stalled.is_set()
    assert [entry["event"] for entry in logs] == ["stop_overdue"]


def test_every_thread_s_stack_is_shown() -> None:
    text = stacks()
    assert f"{threading.current_thread().name}:" in text
    assert "test_every_thread_s_stack_is_shown" in text


KEEPING_THE_INTERPRETER = """
    import ctypes
    from types import SimpleNamespace
    from tidemill_worker.watchdog import Watchdog

    engine = SimpleNamespace(has_died=False, stuck_seconds=0.0)
    service = SimpleNamespace(engine=engine, stop_by=None)
    with Watchdog(service, stall_timeout=0.2, terminate=print, hang_timeout=0.5):
        ctypes.PyDLL(None).sleep(3600)
"""
"""A process that hangs in native code which lets no Python code run beside it."""


def test_a_process_without_python_ends_too() -> None:
    hung = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KEEPING_THE_INTERPRETER)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (hung.returncode, hung.stdout) == (ExitCode.FAILED, "")
    assert 'File "<string>"' in hung.stderr


HANGING_OVER_A_PROMPT = """
    import sys, time
    from tidemill.__main__ import main
    from tidemill_worker.admission import Admission

    Admission.prepare = lambda *_: time.sleep(3600)
    sys.exit(main(sys.argv[1:]))
"""
"""A worker of which a thread hangs, but not the engine's."""

HANGING = """
    import sys, time
    from tidemill.__main__ import main
    from tidemill_worker.model.runner import ModelRunner

    run = ModelRunner.run

    def hang(self, plan, generations):
        if any(generation.owner.request.id.startswith("poison") for generation in generations.values()):
            time.sleep(3600)
        return run(self, plan, generations)

    ModelRunner.run = hang
    sys.exit(main(sys.argv[1:]))
"""
"""A worker that hangs in native code over one job."""


@contextmanager
def real_worker(place: Place, folder: Path, code: str, **flags: object) -> Iterator[subprocess.Popen[str]]:
    make_tiny_llama(folder, vocab_size=make_tokenizer().vocab_size)
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    given = {"redis-url": place.url, "queue": place.queue, "served-model-name": "tiny", "metrics-port": 0}
    given |= {"model": folder, "kv-cache-memory": 0.01, "threads": 1} | flags
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = [sys.executable, "-c", textwrap.dedent(code), "worker", *arguments]
    with confined(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as worker:
        yield worker


async def log_until_end(worker: subprocess.Popen[str]) -> str:
    await eventually(lambda: worker.poll() is not None, timeout=60)
    return worker.communicate()[1]


async def test_a_real_worker_that_hangs_exits(place: Place, client: Client, tmp_path: Path) -> None:
    good, poison = (make_job("Mill", id=name, params={"max_tokens": 3}) for name in ("good", "poison"))
    with real_worker(place, tmp_path, HANGING, stall_timeout=1) as worker:
        await client.submit(good)
        assert (await client.result(good.id, timeout=60)).usage.completion_tokens == 3
        await client.submit(poison)
        log = await log_until_end(worker)
    assert worker.returncode == ExitCode.STALLED
    assert log.count("event=engine_stalled") == 1
    assert "time.sleep(3600)" not in log.split("event=engine_stalled")[0]
    assert "in hang" in log
    view = await client.status(poison.id)
    assert (view.state, view.failures) == (JobState.RUNNING, 0)


async def test_a_thread_that_hangs_does_not_keep_a_real_worker(
    place: Place, client: Client, tmp_path: Path
) -> None:
    """It hands back what the thread was at, and ends as well as any other, with its stack in the log."""
    job = make_job("Mill")
    with real_worker(place, tmp_path, HANGING_OVER_A_PROMPT, grace_period=0) as worker:
        await client.submit(job)
        async with asyncio.timeout(60):
            while (await client.status(job.id)).state is not JobState.RUNNING:
                await asyncio.sleep(0.05)
        worker.terminate()
        log = await log_until_end(worker)
    assert worker.returncode == ExitCode.OK
    assert "event=released" in log
    assert "in <lambda>" in log.split("event=stop_overdue")[1]
    view = await client.status(job.id)
    assert (view.state, view.failures) == (JobState.WAITING, 0)
