"""The engine and deadlines: what is late ends with what there is of it, and costs no step a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.worker.scripted import EOS, Letters, make_engine, make_request, run, script, text, tokens
from tidemill.errors import ErrorCode
from tidemill.jobs import FinishReason
from tidemill.params import SamplingParams
from tidemill_scheduler import SequenceId
from tidemill_worker.engine import Engine, StepOutput
from tidemill_worker.generation import Marks
from tidemill_worker.request import OpenChoice, Request


@dataclass
class Time:
    """Seconds that pass when a test says so."""

    now: float = 0.0
    num_readings: int = 0

    def __call__(self) -> float:
        self.num_readings += 1
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def timed(engine: Engine, time: Time) -> Engine:
    engine.clock = time
    return engine


def computed(engine: Engine) -> list[SequenceId]:
    return [row.sequence for plan in script(engine).plans for row in plan.rows]


def assert_expired(output: StepOutput) -> None:
    assert (output.finished, output.expired) == (True, True)
    assert output.error is not None
    assert (output.error.code, output.error.field) == (ErrorCode.DEADLINE_EXCEEDED, "deadline")


def is_empty(engine: Engine) -> bool:
    engine.check_integrity()
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)


def test_what_is_late_when_it_comes_is_never_run(time: Time) -> None:
    engine = timed(make_engine(), time)
    time.now = 5.0
    engine.add(make_request("late", deadline=5.0))
    [output] = engine.step()
    assert_expired(output)
    assert (output.finish_reason, output.token_ids, output.text) == (FinishReason.EXPIRED, (), "")
    assert output.marks is None
    assert script(engine).plans == []
    assert is_empty(engine)
    assert not engine.has_unfinished


def test_a_deadline_that_passes_while_the_request_waits(time: Time) -> None:
    engine = timed(make_engine(max_num_seqs=1), time)
    engine.add(make_request("first"))
    engine.step()
    engine.add(make_request("late", deadline=3.0))
    time.now = 3.0
    late, first = engine.step()
    assert (late.request_id, first.request_id, first.token_ids) == ("late", "first", (1,))
    assert_expired(late)
    assert late.marks is None
    assert len(run(engine)["first"]) == 3
    assert set(computed(engine)) == {SequenceId(0)}
    assert is_empty(engine)


def test_a_running_request_ends_at_its_deadline_with_all_that_it_has(time: Time) -> None:
    """The letter held back, because it might have begun a stop string, is text now."""
    engine = timed(make_engine({"x": [2, 3, 2, 2]}), time)
    engine.add(make_request("x", stop="cc", deadline=3.0))
    outputs = engine.step() + engine.step()
    assert (text(outputs), tokens(outputs)) == ("b", [2, 3])
    time.now = 3.5
    [last] = engine.step()
    assert_expired(last)
    assert (last.finish_reason, last.stop_reason, last.text) == (FinishReason.EXPIRED, None, "c")
    assert len(script(engine).plans) == 2
    assert is_empty(engine)


def test_a_resumed_request_that_waits_keeps_its_text(time: Time) -> None:
    engine = timed(make_engine(), time)
    replayed = Letters(stop="cc")
    for token in (2, 3):
        replayed.append(token)
    assert replayed.take() == "b"
    params = SamplingParams(max_tokens=5)
    choice = OpenChoice(0, replayed, None, (2, 3))
    engine.add(Request("x", (7, 8), params, 0, [choice], deadline=1.0))
    time.now = 1.0
    [last] = engine.step()
    assert_expired(last)
    assert last.text == "c"


def test_all_generations_of_a_late_request_end(time: Time) -> None:
    """Of those, the one that had ended by itself keeps its reason."""
    engine = timed(make_engine({"x": [2] * 9, "x#1": [3, EOS], "x#2": [1] * 9}), time)
    engine.add(make_request("x", n=3, deadline=2.0))
    outputs = [output for _ in range(3) for output in engine.step()]
    time.now = 2.0
    last = engine.step()
    assert [(output.choice, output.finish_reason, output.finished) for output in last] == [
        (0, FinishReason.EXPIRED, False),
        (2, FinishReason.EXPIRED, True),
    ]
    assert_expired(last[-1])
    assert [output.finish_reason for output in outputs if output.choice == 1][-1] is FinishReason.STOP
    assert is_empty(engine)


def test_generations_that_wait_for_their_sibling_end_with_it(time: Time) -> None:
    """Given a prompt taken in chunks, then those that share it stand aside, and end there. The marks say
    since when it was computed, in vain."""
    engine = timed(make_engine(max_num_seqs=4, max_num_batched_tokens=4, num_blocks=32), time)
    engine.add(make_request("x", range(40, 80), n=3, deadline=1.0))
    assert engine.step() == []
    time.now = 1.0
    last = engine.step()
    assert [output.choice for output in last] == [0, 1, 2]
    assert_expired(last[-1])
    assert last[-1].marks == Marks(added=0.0, scheduled=0.0, first_token=1.0, finished=1.0)
    assert is_empty(engine)


def test_a_request_for_the_prompts_logprobs_alone_ends_too(time: Time) -> None:
    """Its generations are complete: none of them is told that it was cut short."""
    engine = timed(make_engine(), time)
    params = SamplingParams(max_tokens=5, prompt_logprobs=0)
    engine.add(Request("x", (7, 8, 9), params, 0, [], deadline=0.0))
    [last] = engine.step()
    assert_expired(last)
    assert last.finish_reason is None


def test_a_preempted_request_ends_at_its_deadline(time: Time) -> None:
    engine = timed(make_engine({"x": [2] * 9}), time)
    engine.add(make_request("x", deadline=2.0))
    outputs = engine.step()
    engine.scheduler.preempt(SequenceId(0))
    assert (engine.stats().num_waiting, engine.stats().num_preemptions) == (1, 1)
    time.now = 2.0
    [last] = engine.step()
    assert_expired(last)
    assert (text(outputs), last.text, len(script(engine).plans)) == ("b", "", 1)
    assert is_empty(engine)


def test_the_last_token_comes_in_time_if_its_step_began_in_time(time: Time) -> None:
    engine = timed(make_engine({"x": [2, 2], "y": [2, 2]}), time)
    engine.add(make_request("x", max_tokens=1, deadline=1.0))
    engine.add(make_request("y", deadline=1.0))
    time.now = 0.9
    outputs = engine.step()
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH, None]
    time.now = 2.0
    [late] = engine.step()
    assert late.request_id == "y"
    assert_expired(late)


def test_the_deadline_of_a_request_that_is_gone_ends_nothing(time: Time) -> None:
    engine = timed(make_engine(), time)
    for name in ("aborted", "finished"):
        engine.add(make_request(name, deadline=1.0))
    engine.abort("aborted")
    assert list(run(engine)) == ["finished"]
    time.now = 1.0
    assert engine.step() == []


def test_an_id_that_comes_back_has_its_new_deadline_only(time: Time) -> None:
    engine = timed(make_engine(), time)
    for end in (engine.abort, lambda _: run(engine)):
        engine.add(make_request("x", deadline=1.0))
        end("x")
    engine.add(make_request("x", deadline=9.0))
    engine.add(make_request("y"))
    time.now = 2.0
    outputs = run(engine)
    assert [outputs[name][-1].finish_reason for name in ("x", "y")] == [FinishReason.LENGTH] * 2


def test_the_earliest_deadline_goes_first_within_a_priority(time: Time) -> None:
    engine = timed(make_engine(max_num_seqs=1), time)
    deadlines: Sequence[float | None] = (None, 9.0, 7.0, 8.0)
    for deadline in deadlines:
        engine.add(make_request(str(deadline), max_tokens=1, deadline=deadline))
    urgent = make_request("urgent", max_tokens=1)
    urgent.priority = 0
    engine.add(urgent)
    assert list(run(engine)) == ["urgent", "7.0", "8.0", "9.0", "None"]


def test_the_clock_is_read_once_for_all_who_wait(time: Time) -> None:
    engine = timed(make_engine(max_num_seqs=1), time)
    engine.add(make_request("runs", max_tokens=9))
    engine.step()
    for number in range(50):
        engine.add(make_request(str(number), deadline=100.0 + number))
    before = time.num_readings
    engine.step()
    assert time.num_readings == before + 1
