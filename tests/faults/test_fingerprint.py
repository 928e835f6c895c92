"""A job goes on at a worker of another build: it begins anew, for two halves would not be one text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from tests.e2e.oracle import Oracle
from tests.e2e.polling import until
from tests.faults.factories import MODEL, PATIENCE, Place, make_jobs
from tests.faults.invariants import assert_answers, assert_delivered, assert_whole
from tidemill.jobs import Delta


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights, which say something else to the same prompt."""
    return write_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


def last_telling(deltas: list[Delta]) -> list[Delta]:
    """What is left when everything before the restart is void."""
    begin = next(place for place, delta in enumerate(deltas) if delta.restart)
    assert all(delta.index == 0 or not delta.restart for delta in deltas)
    return [delta.model_copy(update={"restart": False}) for delta in deltas[begin:]]


async def test_it_begins_anew(place: Place, other_model: Path) -> None:
    """Every token of the answer, and what a reader is left with, is of the second model."""
    jobs = make_jobs(6, params={"max_tokens": 300})
    first = await place.start_ready()
    await place.submit(*jobs)
    await place.under_way(jobs, first, tokens=20)
    await until(lambda: all(place.told.values()), timeout=PATIENCE)
    first.kill()
    second = await place.start_ready(model=other_model)
    expected = Oracle(other_model, MODEL).answers(jobs)

    results = await place.results(jobs)

    assert_answers(results, [expected[job.id] for job in jobs])
    for job in jobs:
        if job.stream:
            assert_whole(last_telling(await place.deltas(job)), expected[job.id])
    generated = sum(result.usage.completion_tokens for result in results)
    assert second.metric("tidemill_generation_tokens_total") == generated
    await assert_delivered(place)
