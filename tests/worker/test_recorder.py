"""What counts of the results that are recorded, and what they weigh before they are."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.worker.factories import MARKS, MODEL, eventually, make_held, make_job, make_output
from tests.worker.scripted import ranked
from tidemill.jobs import JobId, Result, Status
from tidemill.moves import FinishOutcome
from tidemill_worker.answers import Answers
from tidemill_worker.held import HeldJobs
from tidemill_worker.recorder import Recorder

LAST = make_output("job/1", marks=MARKS)


@dataclass
class SlowQueue:
    """Answers when it is told to."""

    outcome: FinishOutcome
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def finish(self, worker: str, attempt: int, result: Result) -> FinishOutcome:
        self.asked.set()
        await self.answer.wait()
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "counts"), [(FinishOutcome.OK, 1), (FinishOutcome.ALREADY, 1), (FinishOutcome.LOST, 0)]
)
async def test_a_result_counts_when_it_is_recorded(outcome: FinishOutcome, counts: int) -> None:
    """Not before, and not at all if the job was another's: all workers together count each job once."""
    queue: Any = SlowQueue(outcome)
    held, counted = HeldJobs(), []
    job = make_held(ended=True)
    held.hold(job)
    recorder = Recorder(
        queue,
        held,
        worker="w1",
        recorded=lambda held, result: counted.append(result.id),
        unreachable=lambda error: None,
    )
    running = asyncio.create_task(recorder.run())
    recorder.put(job, Result(id=job.id, status=Status.SUCCEEDED))
    await asyncio.wait_for(queue.asked.wait(), 10)
    assert counted == []
    queue.answer.set()
    await eventually(lambda: not len(held))
    assert counted == [JobId("job")] * counts
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("job", "output"),
    [
        pytest.param({}, {"token_ids": tuple(range(10_000)), "text": "x" * 50_000}, id="text and tokens"),
        pytest.param(
            {"params": {"logprobs": 20}},
            {
                "token_ids": tuple(range(500)),
                "logprobs": tuple(ranked(token, 20) for token in range(500)),
            },
            id="logprobs",
        ),
        pytest.param(
            {"params": {"prompt_logprobs": 5}},
            {"prompt_logprobs": tuple(ranked(token, 5) for token in range(2000))},
            id="logprobs of the prompt",
        ),
        pytest.param({"params": {"n": 8, "temperature": 1.0}}, {"text": "y" * 9000}, id="alternatives"),
        pytest.param({"metadata": {"k": "v" * 30_000}}, {}, id="metadata"),
    ],
)
def test_a_result_is_weighed_before_it_is_made(job: dict[str, Any], output: dict[str, Any]) -> None:
    """From the moment the job ends: its answer may wait to be written, and then for Redis."""
    held = make_held(job=make_job(**job))
    for choice in range(1, len(held.choices)):
        held.take_in(replace(LAST, marks=None, choice=choice, **output))
    assert held.result_bytes == 0
    last = replace(LAST, **output)
    held.take_in(last)
    result = Answers(model=MODEL, worker="w1").generated(held, last)
    assert 0.5 < held.result_bytes / len(result.to_wire()) < 2.0


def test_a_job_that_is_cut_short_is_weighed_too() -> None:
    held, job = HeldJobs(), make_held(params={})
    held.hold(job)
    held.record([make_output(job.request_id, 1, 2, text="ab")])
    assert held.unrecorded_bytes == 0
    held.cancel(job.request_id)
    assert held.unrecorded_bytes > 0
