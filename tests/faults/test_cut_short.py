"""Jobs are cancelled, or late, wherever they are: one answer, with the text so far, and free memory."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.e2e.oracle import Answer
from tests.faults.factories import Place, open_place
from tests.faults.invariants import Answers, assert_delivered, assert_whole
from tests.faults.stages import STAGES, Stage
from tests.tidemill.servers import Server
from tidemill.errors import ErrorCode
from tidemill.jobs import FinishReason, Result, Status
from tidemill.moves import CancelOutcome, QueueSettings

OpenPlace = Callable[[], AbstractAsyncContextManager[Place]]

DEADLINE = 10.0
"""Seconds; long enough to be at any stage by then, even with a worker for each on two cores."""
LEASE = 60.0
"""Jobs would end by themselves before their next renewal: a cancellation does not wait for that."""


@pytest.fixture
def patient(shared_server: Server, model: Path, tmp_path: Path) -> OpenPlace:
    """Opens a place whose leases are long."""

    def open_one() -> AbstractAsyncContextManager[Place]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        settings = QueueSettings(lease=LEASE)
        return open_place(shared_server, model, folder, settings=settings, lease=LEASE, renewal=LEASE / 3)

    return open_one


def assert_partial(result: Result, stage: Stage, answers: Answers) -> None:
    """What there was of the answer, if there was any."""
    if not stage.generated:
        assert (result.text, result.token_ids) == ("", ())
        return
    (whole,) = answers([stage.job])
    assert 0 < len(result.token_ids) < len(whole.token_ids)
    assert whole.token_ids[: len(result.token_ids)] == result.token_ids
    assert whole.text.startswith(result.text.rstrip("\ufffd"))  # it may end amid a character


async def assert_over(place: Place, stage: Stage, result: Result) -> None:
    """Readers were told as much as the result says, and a worker that drains has nothing to wait for."""
    if stage.job.stream:
        assert_whole(await place.deltas(stage.job), Answer.of(result))
    if stage.rival is not None:
        await place.client.cancel(stage.rival.id)
    if stage.worker is not None and "event=draining" in stage.worker.log.read_text():
        assert await asyncio.to_thread(stage.worker.wait) == 0
    await assert_delivered(place)


@pytest.mark.parametrize("name", STAGES)
async def test_a_job_is_cancelled(patient: OpenPlace, answers: Answers, name: str) -> None:
    async with patient() as place:
        stage = await STAGES[name](place, None)
        expected = CancelOutcome.CANCELLED if stage.worker is None else CancelOutcome.REQUESTED
        assert await place.client.cancel(stage.job.id) is expected
        (result,) = await place.results([stage.job])
        assert (result.status, result.finish_reason) == (Status.CANCELLED, FinishReason.CANCELLED)
        assert result.error is not None
        assert result.error.code is ErrorCode.CANCELLED
        assert_partial(result, stage, answers)
        await assert_over(place, stage, result)


async def test_jobs_are_late(patient: OpenPlace, answers: Answers) -> None:
    """That is an answer of its own: nobody can take it for one that has reached its length."""
    there = asyncio.Barrier(len(STAGES))

    async def one_is_late(name: str) -> None:
        async with patient() as place:
            stage = await STAGES[name](place, DEADLINE)
            await there.wait()  # what the answers must be is computed here, and would hold up the others
            (result,) = await place.results([stage.job])
            assert (result.status, result.finish_reason) == (Status.EXPIRED, FinishReason.EXPIRED)
            assert result.error is not None
            assert result.error.code is ErrorCode.DEADLINE_EXCEEDED
            assert_partial(result, stage, answers)
            await assert_over(place, stage, result)

    async with asyncio.TaskGroup() as all_at_once:  # most of the time goes by with waiting
        for name in STAGES:
            all_at_once.create_task(one_is_late(name), name=name)
