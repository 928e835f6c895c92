"""Submission: one id is one piece of work, and is answered under every name that asks."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    REPLY,
    WORKER,
    make_job,
    make_result,
    only_result,
    reclaim_after_lapse,
    renewal,
    results_of,
    sibling,
    submit,
    submit_and_claim,
)
from tidemill.errors import InvalidJob, JobConflict, QueueFull
from tidemill.jobs import Job, JobId, Priority
from tidemill.moves import MAX_REPLIES, JobState, Submitted
from tidemill.queue import Queue
from tidemill.wire import SUBMISSIONS_PER_SCRIPT


async def test_an_unknown_id_is_created_and_waits(queue: Queue) -> None:
    job = make_job("a", priority="high", tenant="acme", deadline=60)

    assert await queue.submit([job], reply_to=REPLY) == [Submitted.CREATED]

    view = await queue.status(job.id)
    assert view is not None
    assert (view.state, view.priority, view.tenant) == (JobState.WAITING, Priority.HIGH, "acme")
    assert view.deadline_ms == view.submitted_ms + 60_000
    assert (view.attempt, view.worker, view.replies) == (0, None, {REPLY: None})


async def test_the_payload_arrives_as_it_was_sent(queue: Queue) -> None:
    job = make_job("ü".encode().hex(), prompt="Ein Text mit “Zeichen” \u0000 und 😀", metadata={"k": "ä"})
    await submit(queue, job)

    (claimed,) = await queue.claim(WORKER, 1)

    assert Job.from_wire(claimed.payload) == job


async def test_a_batch_keeps_its_order_and_one_bad_job_harms_none(queue: Queue, redis: Redis) -> None:
    await submit(queue, make_job("taken", prompt="one"))
    queue = sibling(queue, redis, max_payload=500)
    jobs = [make_job("a"), make_job("taken", prompt="two"), make_job("big", prompt="x" * 600), make_job("b")]

    outcomes = await queue.submit(jobs, reply_to=REPLY)

    assert [type(outcome) for outcome in outcomes] == [Submitted, JobConflict, InvalidJob, Submitted]
    too_large = outcomes[2]
    assert isinstance(too_large, InvalidJob)
    assert (too_large.field, too_large.limit) == ("payload", 500)
    assert await queue.status(JobId("big")) is None


async def test_a_repeat_of_a_live_job_is_live_and_adds_its_reply_name(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)

    assert await queue.submit([make_job("a")], reply_to=REPLY) == [Submitted.LIVE]
    assert await queue.submit([make_job("a")], reply_to="second") == [Submitted.LIVE]
    await queue.finish(WORKER, claimed.attempt, make_result("a"))

    assert await only_result(queue, "a") == await only_result(queue, "a", "second") == make_result("a")
    assert await queue.claim(OTHER, 10) == []


async def test_two_spellings_of_one_job_are_one_job(queue: Queue) -> None:
    """llm-d-batch-gateway#293: re-enqueued with different JSON bytes, it ran twice."""
    await submit(queue, make_job("a", priority="low", metadata={"try": "1"}))

    again = make_job("a", priority="high", metadata={"try": "2"})
    assert await queue.submit([again], reply_to=REPLY) == [Submitted.LIVE]
    assert len(await queue.claim(WORKER, 10)) == 1


async def test_a_reply_name_that_begins_like_another_is_another(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)
    await queue.submit([make_job("a")], reply_to="rep")
    await queue.finish(WORKER, claimed.attempt, make_result("a"))

    assert await only_result(queue, "a", "rep") == make_result("a")


async def test_a_repeat_of_a_finished_job_delivers_its_result_to_a_new_name_once(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)
    await queue.finish(WORKER, claimed.attempt, make_result("a"))

    for _ in range(2):
        assert await queue.submit([make_job("a")], reply_to="late") == [Submitted.DONE]
        assert await queue.submit([make_job("a")], reply_to=REPLY) == [Submitted.DONE]

    assert await only_result(queue, "a", "late") == await only_result(queue, "a") == make_result("a")
    assert (await queue.depth()).total == 0


@pytest.mark.parametrize("is_done", [False, True], ids=["unfinished", "finished"])
async def test_a_result_goes_to_so_many_names_and_no_more(queue: Queue, is_done: bool) -> None:
    claimed = await submit_and_claim(queue)
    if is_done:
        await queue.finish(WORKER, claimed.attempt, make_result("a"))
    for i in range(1, MAX_REPLIES):
        (outcome,) = await queue.submit([make_job("a")], reply_to=f"r{i}")
        assert outcome is (Submitted.DONE if is_done else Submitted.LIVE)

    (refused,) = await queue.submit([make_job("a")], reply_to="one-more")
    (known,) = await queue.submit([make_job("a")], reply_to="r1")

    assert isinstance(refused, InvalidJob)
    assert (refused.field, refused.limit) == ("reply_to", MAX_REPLIES)
    assert known is (Submitted.DONE if is_done else Submitted.LIVE)
    if not is_done:
        await queue.finish(WORKER, claimed.attempt, make_result("a"))
    for name in (REPLY, "r1", f"r{MAX_REPLIES - 1}"):
        assert await only_result(queue, "a", name) == make_result("a")
    assert await queue.results("one-more") == []


async def test_a_finished_job_whose_result_was_acknowledged_does_not_run_again(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)
    await queue.finish(WORKER, claimed.attempt, make_result("a"))
    ((entry, _),) = await queue.results(REPLY)
    await queue.acknowledge(REPLY, [entry])

    assert await queue.submit([make_job("a")], reply_to="late") == [Submitted.DONE]
    assert await results_of(queue, "a", "late") == []
    assert await queue.claim(WORKER, 1) == []


@pytest.mark.parametrize("state", list(JobState))
async def test_other_content_under_a_known_id_is_a_conflict(
    queue: Queue, redis: Redis, state: JobState
) -> None:
    claimed = await submit_and_claim(queue)
    if state is JobState.DONE:
        await queue.finish(WORKER, claimed.attempt, make_result("a"))
    elif state is JobState.WAITING:
        await queue.release(WORKER, [renewal(claimed)])
    elif state is JobState.DELAYED:
        await reclaim_after_lapse(redis, queue, "a")
        await reclaim_after_lapse(redis, queue, "a")
    view = await queue.status(claimed.job_id)
    assert view is not None
    assert view.state is state

    (outcome,) = await queue.submit([make_job("a", prompt="other")], reply_to="thief")

    assert isinstance(outcome, JobConflict)
    assert await queue.results("thief") == []


async def test_a_full_queue_refuses_new_jobs_and_knows_old_ones(queue: Queue, redis: Redis) -> None:
    queue = sibling(queue, redis, max_depth=2)
    await submit(queue, make_job("a"), make_job("b", tenant="other"))

    full, known = await queue.submit([make_job("c"), make_job("a")], reply_to=REPLY)

    assert isinstance(full, QueueFull)
    assert full.limit == 2
    assert known is Submitted.LIVE
    await queue.cancel(JobId("b"))
    await submit(queue, make_job("c"))


async def test_running_and_delayed_jobs_count_against_the_limit(queue: Queue, redis: Redis) -> None:
    queue = sibling(queue, redis, max_depth=1)
    await submit_and_claim(queue)

    (outcome,) = await queue.submit([make_job("b")], reply_to=REPLY)

    assert isinstance(outcome, QueueFull)


async def test_a_tenant_at_its_limit_does_not_keep_others_out(queue: Queue, redis: Redis) -> None:
    queue = sibling(queue, redis, max_tenant_depth=2)
    await submit(queue, make_job("a", tenant="big"), make_job("b", tenant="big", priority="low"))

    full, fine = await queue.submit(
        [make_job("c", tenant="big", priority="high"), make_job("d", tenant="small")], reply_to=REPLY
    )

    assert isinstance(full, QueueFull)
    assert fine is Submitted.CREATED


async def test_a_batch_of_several_scripts_is_one_batch(queue: Queue, redis: Redis) -> None:
    limit = 2 * SUBMISSIONS_PER_SCRIPT + 3
    queue = sibling(queue, redis, max_payload=500, max_depth=limit)
    jobs = [make_job(f"j{i}") for i in range(limit + 5)]
    jobs[SUBMISSIONS_PER_SCRIPT] = make_job("big", prompt="x" * 600)
    jobs.insert(SUBMISSIONS_PER_SCRIPT + 1, make_job("j0", prompt="another"))

    outcomes = await queue.submit(jobs, reply_to=REPLY)

    assert [type(outcome) for outcome in outcomes] == [
        *[Submitted] * SUBMISSIONS_PER_SCRIPT,
        InvalidJob,
        JobConflict,
        *[Submitted] * (limit - SUBMISSIONS_PER_SCRIPT),
        *[QueueFull] * 4,
    ]
    accepted = [job.id for job, outcome in zip(jobs, outcomes, strict=True) if outcome == Submitted.CREATED]
    assert [claimed.job_id for claimed in await queue.claim(WORKER, 1000)] == accepted


async def test_an_absent_seed_is_drawn_once_and_stays(queue: Queue) -> None:
    first = await submit_and_claim(queue)
    await queue.submit([make_job("a")], reply_to=REPLY)
    await queue.release(WORKER, [renewal(first)])
    (second,) = await queue.claim(OTHER, 1)

    assert 0 <= first.seed < 2**63
    assert second.seed == first.seed


@pytest.mark.parametrize("seed", [0, 1, 2**53 + 1, 2**63 - 1])
async def test_a_given_seed_arrives_exactly(queue: Queue, seed: int) -> None:
    claimed = await submit_and_claim(queue, seed=seed)

    assert claimed.seed == seed


async def test_a_jobs_own_reply_name_goes_before_the_clients(queue: Queue) -> None:
    claimed = await submit_and_claim(queue, reply_to="mine")
    await queue.finish(WORKER, claimed.attempt, make_result("a"))

    assert await only_result(queue, "a", "mine") == make_result("a")
    assert await queue.results(REPLY) == []


async def test_submitting_nothing_is_nothing(queue: Queue) -> None:
    assert await queue.submit([], reply_to=REPLY) == []
