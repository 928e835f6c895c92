"""What must hold after every fault, whatever happened: read off the server and off the workers themselves."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import redis
from worker_logs import complaints
from worker_processes import WorkerProcess

from tests.e2e.oracle import Answer
from tests.e2e.polling import until
from tests.faults.factories import PATIENCE, Place
from tests.tidemill.audit import Audit
from tidemill.errors import ErrorCode
from tidemill.jobs import Delta, Job, JobId, Result, Status

Answers = Callable[[Sequence[Job]], list[Answer]]
"""Says what the answers to jobs are, undisturbed; takes its time."""

COUNTS = ("running", "waiting", "held", "unrecorded")


async def assert_delivered(
    place: Place, *, buried: Collection[JobId] = (), errors: Collection[str] = ()
) -> None:
    """Every submitted job has its one answer, and nothing is left of how it came about.

    Args:
        buried: the jobs that must be among the dead letters, each once; nobody else may be.
        errors: words of what workers may complain about in their logs.
    """
    await until(lambda: place.submitted.keys() <= place.answered_ids(), timeout=PATIENCE)
    for worker in place.workers.alive:
        await until(lambda: asyncio.to_thread(_is_idle, worker), timeout=PATIENCE)  # noqa: B023  # awaited here
    assert Counter(place.result_ids()) == dict.fromkeys(place.submitted, 1)
    with place.redis() as server:
        _assert_buried(server, place, buried)
        assert Audit(server, place.keys.prefix).run() == []
        assert _job_streams(server, place) == []
    depth = await place.queue.depth()
    assert (depth.total, depth.waiting, depth.running, depth.delayed) == (0, 0, 0, 0)
    assert complaints([worker.log for worker in place.workers.started], errors) == []


def _is_idle(worker: WorkerProcess) -> bool:
    """Nothing held, nothing in the engine, every block of the pool given back."""
    try:
        health = worker.health()
        is_busy = not health["ok"] or any(health[count] for count in COUNTS)
        return not is_busy and worker.metric("tidemill_kv_cache_usage_ratio") == 0
    except OSError:  # started only just now
        return False


def _assert_buried(server: redis.Redis, place: Place, buried: Collection[JobId]) -> None:
    letters = [fields[b"id"].decode() for _, fields in server.xrange(place.keys.dead)]
    assert Counter(letters) == dict.fromkeys(buried, 1)
    answers = _answers(server, place)
    exhausted = {
        job_id
        for job_id, answer in answers.items()
        if answer["status"] == Status.FAILED and answer["error"]["code"] == ErrorCode.ATTEMPTS_EXHAUSTED
    }
    assert exhausted == set(buried)


def _answers(server: redis.Redis, place: Place) -> dict[str, dict[str, Any]]:
    entries = server.xrange(place.keys.results(place.client.results))
    return {fields[b"id"].decode(): json.loads(fields[b"result"]) for _, fields in entries}


def _job_streams(server: redis.Redis, place: Place) -> list[bytes]:
    prefix = place.keys.prefix
    return [
        key for kind in ("jobs:", "returned:") for key in server.scan_iter(f"{prefix}{kind}*", count=1000)
    ]


def assert_answers(results: Sequence[Result], answers: Sequence[Answer]) -> None:
    """All succeeded, with the text of an undisturbed run to the bit, and nothing charged twice."""
    for result, answer in zip(results, answers, strict=True):
        assert (result.status, result.error) == (Status.SUCCEEDED, None)
        assert Answer.of(result) == answer
        generated = sum(len(choice.token_ids) for choice in answer.choices)
        assert result.usage.completion_tokens == generated


def assert_whole(deltas: Sequence[Delta], answer: Answer) -> None:
    """The pieces are the text and the tokens of each choice, without a gap or a repeat."""
    position = 0
    for delta in deltas:
        assert (delta.index, delta.restart) == (position, False)
        position += len(delta.token_ids)
    for choice in answer.choices:
        pieces = [delta for delta in deltas if delta.choice == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert sum((piece.token_ids for piece in pieces), ()) == choice.token_ids
        if choice.logprobs is not None:
            assert sum((piece.logprobs for piece in pieces), ()) == choice.logprobs


async def assert_undisturbed(place: Place, jobs: Sequence[Job], answers: Answers) -> list[Result]:
    """Nobody can tell from these jobs' results, or from their streams, that anything happened.

    What they must be is computed beside the event loop, on which a worker's connection may be proxied.
    """
    results = await place.results(jobs)
    expected = await asyncio.to_thread(answers, jobs)
    assert_answers(results, expected)
    for job, answer in zip(jobs, expected, strict=True):
        if job.stream:
            assert_whole(await place.deltas(job), answer)
    return results
