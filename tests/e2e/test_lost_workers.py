"""Workers die, drain and lose their server in mid-generation: one answer each, and the undisturbed one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.crew import LEASE, PLACES, Crew
from tests.e2e.oracle import Answer, Oracle
from tests.e2e.polling import until
from tests.e2e.processes import Worker
from tests.tidemill.audit import Audit
from tests.tidemill.servers import Server, running, valkey_binary
from tidemill.client import Client, ClientSettings
from tidemill.connection import connect
from tidemill.jobs import Delta, Job, JobId, Result, Status
from tidemill.keys import QueueKeys
from tidemill.moves import CancelOutcome, JobState, QueueSettings
from tidemill.params import SamplingParams
from tidemill.queue import Queue

QUEUE = "crew"
MAX_TOKENS = 160
"""Some seconds of generation: what interrupts it comes in its middle."""
CHECKPOINTED = 8
PATIENT, BRIEF = 60.0, 0.2
"""Grace periods: one within which all jobs end, one within which none does."""

pytestmark = pytest.mark.timeout(180)


def make_jobs(label: str, *, max_tokens: int = MAX_TOKENS) -> list[Job]:
    """Greedy and drawn, streamed and not, all that a checkpoint has to hold: one for each place."""
    prompts = ["The tide was", "Once a miller", "In the morning they", "The old mill"]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.8, "prompt_logprobs": 0},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.8, "structured_outputs": {"regex": "[a-z ]{2000}"}, "logprobs": 0},
    ]
    return [
        Job(
            id=JobId(f"{label}-{number}-{uuid.uuid4().hex[:8]}"),
            prompt=prompt,
            params=SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=True, **kinds[number]),
            stream=number >= 2,
        )
        for number, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def lasting_server() -> Iterator[Server]:
    with running(valkey_binary(), "--appendonly", "yes", "--appendfsync", "always") as started:
        started.await_uptime(LEASE)  # before that, nobody's lease is taken away
        yield started


@pytest.fixture(scope="module")
def crew(
    lasting_server: Server, smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Crew]:
    made = Crew(smollm2_folder, lasting_server.url, QUEUE, tmp_path_factory.mktemp("crew"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def undisturbed(oracle: Oracle) -> list[Answer]:
    jobs = make_jobs("oracle")
    answers = oracle.answers(jobs)
    return [answers[job.id] for job in jobs]


@dataclass
class Place:
    """The test's end of the queue."""

    client: Client
    queue: Queue
    server: Server

    async def submit(self, jobs: Sequence[Job]) -> None:
        assert await self.client.submit_batch(jobs) == [job.id for job in jobs]

    async def begun(self, jobs: Sequence[Job], worker: Worker) -> None:
        """Return once `worker` has generated and checkpointed some of each."""

        async def is_under_way() -> bool:
            views = [await self.client.status(job.id) for job in jobs]
            assert all(view.state is not JobState.DONE for view in views), "the jobs are too short"
            return all(
                worker.holds(view.worker) and view.checkpointed_tokens >= CHECKPOINTED for view in views
            )

        await until(is_under_way)

    async def results(self, jobs: Sequence[Job]) -> list[Result]:
        ids = [job.id for job in jobs]
        found = {result.id: result async for result in self.client.as_completed(ids, timeout=60)}
        return [found[job_id] for job_id in ids]

    async def deltas(self, job: Job) -> list[Delta]:
        return [delta async for delta in self.client.stream(job.id)]

    async def assert_nothing_left(self) -> None:
        """Every job has one answer, and no trace of how it came about is left in the queue."""
        depth = await self.client.depth()
        assert (depth.total, depth.running, depth.dead_letters) == (0, 0, 0)
        entries = [result.id for _, result in await self.queue.results(self.client.results, count=1000)]
        assert len(entries) == len(set(entries))
        with self.server.client() as redis:
            assert Audit(redis, QueueKeys(QUEUE).prefix).run() == []


@pytest.fixture
async def place(lasting_server: Server) -> AsyncIterator[Place]:
    settings = QueueSettings(lease=LEASE)
    redis = connect(lasting_server.url)
    queue = Queue(redis, QUEUE, settings)
    async with Client(lasting_server.url, queue=QUEUE, settings=ClientSettings(queue=settings)) as client:
        yield Place(client, queue, lasting_server)
    await queue.aclose()
    await redis.aclose()


def assert_whole(deltas: Sequence[Delta], answer: Answer) -> None:
    """The pieces are the text and the tokens, without a gap or a repeat."""
    position = 0
    for delta in deltas:
        assert delta.index == position
        position += len(delta.token_ids)
    assert "".join(delta.text for delta in deltas) == answer.text
    assert sum((delta.token_ids for delta in deltas), ()) == answer.token_ids


async def test_a_killed_worker_s_jobs_go_on_where_they_were(
    crew: Crew, place: Place, undisturbed: list[Answer]
) -> None:
    """kill -9 in mid-generation: the other worker resumes, and nobody can tell from the answers."""
    victim, survivor = await crew.exactly(PATIENT, PATIENT)
    survivor.pause()  # until the victim has all four
    jobs, own = make_jobs("orphan"), make_jobs("own", max_tokens=12)[:2]
    await place.submit(jobs)
    streams = [asyncio.create_task(place.deltas(job)) for job in jobs if job.stream]
    await place.begun(jobs, victim)
    survivor.go_on()
    before = survivor.metric("tidemill_generation_tokens_total")
    await place.submit(own)
    await place.begun(jobs, victim)
    victim.kill()

    results = await place.results([*jobs, *own])
    for result, answer in zip(results, undisturbed, strict=False):
        assert result.status is Status.SUCCEEDED
        assert Answer.of(result) == answer
        assert result.attempts == 2
    assert all(survivor.did(result) for result in results)
    for stream, answer in zip(streams, undisturbed[2:], strict=True):
        assert_whole(await stream, answer)

    # Resumed, not begun again: the survivor has generated what was missing only.
    survivor_tokens = survivor.metric("tidemill_generation_tokens_total") - before
    everything = sum(result.usage.completion_tokens for result in results)
    assert survivor_tokens <= everything - PLACES * CHECKPOINTED
    await place.assert_nothing_left()


async def test_a_killed_worker_s_choices_go_on_where_they_were(
    crew: Crew, place: Place, oracle: Oracle
) -> None:
    """Each of a job's generations has a checkpoint of its own; one has ended before the worker did."""
    victim, survivor = await crew.exactly(PATIENT, PATIENT)
    survivor.pause()
    params = SamplingParams(
        n=3, temperature=0.9, seed=5, max_tokens=MAX_TOKENS, logprobs=2, prompt_logprobs=1, echo=True
    )
    job = Job(id=JobId(f"choices-{uuid.uuid4().hex[:8]}"), prompt="Once", params=params, stream=True)
    answer = oracle.answers([job])[job.id]
    await place.submit([job])
    stream = asyncio.create_task(place.deltas(job))
    await place.begun([job], victim)
    victim.kill()
    survivor.go_on()

    (result,) = await place.results([job])
    assert (result.attempts, Answer.of(result)) == (2, answer)
    assert survivor.did(result)
    deltas = await stream
    assert [delta.index for delta in deltas] == [
        sum(len(earlier.token_ids) for earlier in deltas[:number]) for number in range(len(deltas))
    ]
    for choice in result.choices:
        own = [delta for delta in deltas if delta.choice == choice.index]
        assert "".join(delta.text for delta in own) == choice.text
        assert sum((delta.token_ids for delta in own), ()) == choice.token_ids
        assert sum((delta.logprobs for delta in own), ()) == choice.logprobs
    await place.assert_nothing_left()


async def test_a_drained_worker_ends_what_it_has_begun_and_leaves_the_rest(crew: Crew, place: Place) -> None:
    (draining,) = await crew.exactly(PATIENT)
    begun, rest = make_jobs("begun", max_tokens=64), make_jobs("rest", max_tokens=4)
    await place.submit(begun)
    await place.begun(begun, draining)
    await place.submit(rest)
    draining.terminate()

    results = await place.results(begun)
    assert draining.ended() == 0
    assert all(draining.did(result) and result.attempts == 1 for result in results)
    views = [await place.client.status(job.id) for job in rest]
    assert {(view.state, view.attempt) for view in views} == {(JobState.WAITING, 0)}

    (heir,) = await crew.exactly(BRIEF)
    results = await place.results(rest)
    assert all(heir.did(result) and result.attempts == 1 for result in results)
    await place.assert_nothing_left()


async def test_what_outlasts_the_grace_period_is_handed_back_and_resumed(
    crew: Crew, place: Place, undisturbed: list[Answer]
) -> None:
    draining, heir = await crew.exactly(BRIEF, PATIENT)
    before = heir.metric("tidemill_generation_tokens_total")
    heir.pause()  # until all is handed back
    jobs = make_jobs("handed-back")
    await place.submit(jobs)
    streams = [asyncio.create_task(place.deltas(job)) for job in jobs if job.stream]
    await place.begun(jobs, draining)
    draining.terminate()
    assert draining.ended() == 0
    views = [await place.client.status(job.id) for job in jobs]
    assert {(view.state, view.failures) for view in views} == {(JobState.WAITING, 0)}
    stored = sum(view.checkpointed_tokens for view in views)
    assert (await place.client.depth()).waiting == len(jobs)

    heir.go_on()
    results = await place.results(jobs)
    assert [Answer.of(result) for result in results] == undisturbed
    assert all(heir.did(result) for result in results)
    for stream, answer in zip(streams, undisturbed[2:], strict=True):
        assert_whole(await stream, answer)
    everything = sum(result.usage.completion_tokens for result in results)
    assert heir.metric("tidemill_generation_tokens_total") - before == everything - stored
    await place.assert_nothing_left()


async def test_a_killed_server_with_its_data_loses_no_job(
    crew: Crew, place: Place, lasting_server: Server, undisturbed: list[Answer]
) -> None:
    """The engine goes on meanwhile, and what it finishes waits for the server to come back."""
    (worker,) = await crew.exactly(PATIENT)
    jobs, waiting = make_jobs("through"), make_jobs("behind", max_tokens=4)
    await place.submit(jobs)
    await place.submit(waiting)
    asked = [asyncio.create_task(place.client.result(job.id)) for job in jobs]
    await place.begun(jobs, worker)
    lasting_server.kill()
    await until(lambda: worker.health("unrecorded") == len(jobs), timeout=60)
    lasting_server.start()

    assert [Answer.of(result) for result in await asyncio.gather(*asked)] == undisturbed
    results = await place.results([*jobs, *waiting])
    assert {result.status for result in results} == {Status.SUCCEEDED}
    assert all(worker.did(result) and result.attempts == 1 for result in results)
    await place.assert_nothing_left()


async def test_a_second_signal_hands_everything_back_at_once(
    crew: Crew, place: Place, undisturbed: list[Answer]
) -> None:
    (worker,) = await crew.exactly(PATIENT)
    jobs = make_jobs("released")
    await place.submit(jobs)
    await place.begun(jobs, worker)
    worker.terminate()
    await until(lambda: "event=draining" in worker.log.read_text())
    worker.terminate()
    assert worker.ended() == 0
    for job in jobs:
        view = await place.client.status(job.id)
        assert (view.state, view.failures) == (JobState.WAITING, 0)
        assert await place.client.cancel(job.id) is CancelOutcome.CANCELLED
    for result, answer in zip(await place.results(jobs), undisturbed, strict=True):
        assert result.status is Status.CANCELLED
        assert CHECKPOINTED <= len(result.token_ids) < MAX_TOKENS
        assert answer.token_ids[: len(result.token_ids)] == result.token_ids
        assert answer.text.startswith(result.text)
    await place.assert_nothing_left()
