"""What a step of the engine costs does not depend on how many wait, counted in bytecodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from tests.worker.scripted import make_engine, make_request
from tidemill_worker.engine import Engine

NUM_RUNNING = 256


def count_bytecodes(work: Callable[[], object]) -> int:
    """How many bytecodes run in `work`, in all that it calls; what is written in C counts as one."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count


def make_full_engine(*, num_waiting: int) -> Engine:
    engine = make_engine(
        num_blocks=4 * NUM_RUNNING, max_num_seqs=NUM_RUNNING, max_num_batched_tokens=4 * NUM_RUNNING
    )
    for number in range(NUM_RUNNING + num_waiting):
        engine.add(make_request(str(number), (number, 8), max_tokens=8, deadline=1e9 + number))
    while engine.stats().num_running < NUM_RUNNING:
        engine.step()
    assert engine.stats().num_waiting == num_waiting
    return engine


def steps_and_stats(engine: Engine) -> None:
    """From one in which all decode to one in which all have ended and others take their places."""
    while engine.stats().generation_tokens < 10 * NUM_RUNNING:
        engine.step()
        engine.stats()


def test_steps_cost_the_same_however_many_wait() -> None:
    """A look at each of those that wait would cost at least one bytecode for it."""
    few, many = 300, 10_000
    costs = [count_bytecodes(partial(steps_and_stats, make_full_engine(num_waiting=n))) for n in (few, many)]
    assert costs[1] < costs[0] + (many - few) // 2
