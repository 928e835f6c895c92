"""The engine's thread: takes commands between steps, never waits with work to do, ends when told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import pytest
from structlog.testing import capture_logs

from tests.worker.factories import FakeEngine, eventually, make_job, make_tokenizer
from tests.worker.hanging import HangingEngine
from tidemill.errors import ErrorCode
from tidemill_worker.engine import StepOutput
from tidemill_worker.engine_thread import EngineThread
from tidemill_worker.request import OpenChoice, Request


class Listener:
    def __init__(self) -> None:
        self.outputs: queue.Queue[StepOutput] = queue.Queue()
        self.failed = threading.Event()

    def deliver(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            self.outputs.put(output)

    def until_finished(self, request_id: str) -> list[StepOutput]:
        seen = []
        while True:
            output = self.outputs.get(timeout=10)
            if output.request_id == request_id:
                seen.append(output)
                if output.finished:
                    return seen


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_prompt=20)


@pytest.fixture
def thread(engine: FakeEngine, listener: Listener) -> Iterator[EngineThread]:
    thread = EngineThread(engine, deliver=listener.deliver, on_failure=listener.failed.set)
    thread.start()
    yield thread
    engine.free()
    thread.stop()
    assert not thread.is_alive


def make_request(name: str, prompt: str = "Mill", max_tokens: int = 4) -> Request:
    tokenizer = make_tokenizer()
    job = make_job(prompt, params={"max_tokens": max_tokens})
    choices = [OpenChoice(0, tokenizer.output_text(job.params))]
    return Request(name, tokenizer.prompt_token_ids(job), job.params, 0, choices)


def test_requests_run_until_they_finish(thread: EngineThread, listener: Listener) -> None:
    thread.submit(make_request("a"))
    assert [output.finished for output in listener.until_finished("a")] == [False, False, False, True]
    thread.submit(make_request("b"))
    assert len(listener.until_finished("b")) == 4
    assert thread.stats.num_running == 0
    assert thread.stuck_seconds == 0.0


def test_a_request_the_engine_refuses_is_answered_alone(thread: EngineThread, listener: Listener) -> None:
    thread.submit(make_request("big", "qz" * 40))
    thread.submit(make_request("small"))
    [refused] = listener.until_finished("big")
    assert refused.error is not None
    assert (refused.error.code, refused.error.field) == (ErrorCode.INVALID_REQUEST, "prompt")
    assert refused.error.limit == 20
    listener.until_finished("small")


def test_an_abort_is_obeyed_between_two_steps(
    thread: EngineThread, engine: FakeEngine, listener: Listener
) -> None:
    engine.paced = True
    thread.submit(make_request("a", max_tokens=1000))
    engine.allow(1)
    assert listener.outputs.get(timeout=10).request_id == "a"
    thread.abort("a")
    thread.submit(make_request("b"))
    engine.free()
    assert [output.request_id for output in listener.until_finished("b")] == ["b"] * 4
    assert engine.aborted == ["a"]


async def test_work_that_does_not_move_is_noticed(thread: EngineThread, engine: FakeEngine) -> None:
    """Requests that nothing is computed of, behind a thread that is well (vllm#45414)."""
    engine.paced = True
    thread.submit(make_request("a", max_tokens=1000))
    await eventually(lambda: thread.stuck_seconds > 0.05)
    engine.allow(1)
    await eventually(lambda: engine._generated == 1)
    await eventually(lambda: thread.stuck_seconds < 0.05)
    thread.abort("a")
    await eventually(lambda: engine.aborted)
    await eventually(lambda: thread.stuck_seconds == 0.0)


async def test_the_books_are_compared_when_there_is_nothing_to_do(
    thread: EngineThread, engine: FakeEngine, listener: Listener
) -> None:
    thread.submit(make_request("a"))
    listener.until_finished("a")
    await eventually(lambda: engine.checks == 1)


async def test_nobody_waits_for_a_step(listener: Listener) -> None:
    """Who renews leases and talks to Redis hands over and takes back at once; the backlog tells how much."""
    engine = HangingEngine()
    thread = EngineThread(engine, deliver=listener.deliver, on_failure=listener.failed.set)
    thread.start()
    thread.submit(make_request("0"))
    await eventually(engine.stepping.is_set)
    assert not thread.is_idle
    for number in range(1, 20):
        thread.submit(make_request(str(number)))
    thread.abort("1")
    assert thread.backlog == 20
    engine.free()
    listener.until_finished("19")
    assert engine.seen == [str(number) for number in range(20)]
    await eventually(lambda: thread.is_idle)
    thread.stop()


async def test_a_thread_is_idle_only_when_the_step_with_the_last_request_is_over(listener: Listener) -> None:
    """Though nobody waits for its answer any more."""
    engine = HangingEngine()
    thread = EngineThread(engine, deliver=listener.deliver, on_failure=listener.failed.set)
    thread.start()
    assert thread.is_idle
    thread.submit(make_request("a"))
    await eventually(engine.stepping.is_set)
    thread.abort("a")
    assert not thread.is_idle
    engine.free()
    await eventually(lambda: thread.is_idle)
    assert engine.aborted == ["a"]
    thread.stop()


def test_a_step_that_hangs_does_not_hold_up_the_stop(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill_worker.engine_thread.JOIN_TIMEOUT", 0.05)
    engine = HangingEngine()
    thread = EngineThread(engine, deliver=listener.deliver, on_failure=listener.failed.set)
    thread.start()
    thread.submit(make_request("a"))
    assert engine.stepping.wait(10)
    thread.stop()
    assert (thread.is_alive, thread.has_died) == (True, False)
    assert thread.stuck_seconds > 0.0
    engine.free()
    thread._thread.join(10)
    assert (thread.is_alive, thread.has_died, thread.stuck_seconds) == (False, False, 0.0)
    assert listener.outputs.empty()  # whoever has stopped it may be gone


def test_a_step_that_raises_ends_the_thread_and_says_so(listener: Listener) -> None:
    poison = make_tokenizer()._backend.token_to_id("Z")
    engine = FakeEngine(poison=poison)
    thread = EngineThread(engine, deliver=listener.deliver, on_failure=listener.failed.set)
    with capture_logs() as logs:
        thread.start()
        thread.submit(make_request("z", "Z"))
        assert listener.failed.wait(10)
        thread.stop()
    assert not thread.is_alive
    assert [entry["event"] for entry in logs] == ["engine_failed"]
    thread.submit(make_request("late"))  # nobody waits for a thread that has ended
    thread.abort("z")
