"""A job that brings its workers down is found out alone, and takes no other one with it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    LEASE,
    OTHER,
    WORKER,
    lapse,
    make_due,
    make_job,
    make_result,
    make_suspect,
    only_result,
    reclaim_after_lapse,
    renewal,
    sibling,
    submit,
    submit_and_claim,
    timeless,
)
from tidemill.errors import ErrorCode
from tidemill.jobs import JobId, Status
from tidemill.moves import CancelOutcome, Claimed, FinishOutcome, JobState
from tidemill.queue import Queue

A = JobId("a")
POISON = "j5"
NUM_JOBS = 16


async def suspect(queue: Queue, redis: Redis, job_id: str = A, worker: str = WORKER) -> Claimed:
    """One such job in the hands of a worker."""
    await submit(queue, make_job(job_id))
    await make_suspect(redis, queue, job_id)
    (claimed,) = await queue.claim(worker, 5)
    assert claimed.alone
    return claimed


async def alone_field(queue: Queue, redis: Redis, job_id: JobId = A) -> bytes | None:
    value: bytes | None = await redis.hget(queue.keys.job(job_id), "alone")
    return value


class MortalWorkers:
    """Workers that take what they can get, run suspects alone, and die as soon as they run the poison."""

    def __init__(self, queue: Queue, redis: Redis) -> None:
        self.queue = queue
        self.redis = redis
        self.deaths = 0
        self.run_alone: Counter[str] = Counter()

    async def live(self) -> None:
        """One life: from start to death, or until there is nothing to do."""
        worker = f"w{self.deaths}"
        while held := await self.take(worker):
            aside = [job for job in held if job.alone]
            crowd = [job for job in held if not job.alone]
            if not await self.run(worker, crowd):
                return await self.die(held)
            for job in aside:
                assert await self.queue.begin(worker, job.job_id, job.attempt)
                self.run_alone[job.job_id] += 1
                if not await self.run(worker, [job]):
                    return await self.die([job])

    async def take(self, worker: str) -> list[Claimed]:
        for job_id in await self.redis.zrange(self.queue.keys.delayed, 0, -1):
            await make_due(self.redis, self.queue, job_id.decode())
        return await self.queue.reclaim(worker, NUM_JOBS) or await self.queue.claim(worker, NUM_JOBS)

    async def run(self, worker: str, jobs: list[Claimed]) -> bool:
        if any(job.job_id == POISON for job in jobs):
            return False
        for job in jobs:
            result = make_result(job.job_id)
            assert await self.queue.finish(worker, job.attempt, result) is FinishOutcome.OK
        return True

    async def die(self, held: list[Claimed]) -> None:
        self.deaths += 1
        await lapse(self.redis, self.queue, *(job.job_id for job in held))


async def test_a_poisonous_job_is_buried_alone_and_its_neighbours_are_answered(
    queue: Queue, redis: Redis
) -> None:
    """taskiq-aio-pika#35: one such job was a loop of crashes. Here 15 others died with it each time."""
    names = [f"j{i}" for i in range(NUM_JOBS)]
    await submit(queue, *map(make_job, names))
    workers = MortalWorkers(queue, redis)

    while (depth := await queue.depth()).total + depth.running:
        await workers.live()

    assert workers.deaths == queue.settings.max_attempts
    assert workers.run_alone == Counter(names)
    (letter,) = await queue.dead_letters()
    assert (letter.job_id, letter.failures) == (POISON, queue.settings.max_attempts)
    for name in names:
        result = await only_result(queue, name)
        assert result.status is (Status.FAILED if name == POISON else Status.SUCCEEDED)
    error = (await only_result(queue, POISON)).error
    assert error is not None
    assert error.code is ErrorCode.ATTEMPTS_EXHAUSTED


async def test_a_suspect_ends_the_batch_of_a_claim(queue: Queue, redis: Redis) -> None:
    await submit(queue, *map(make_job, "abcde"))
    await make_suspect(redis, queue, "b", "c")

    batches = [await queue.claim(WORKER, 5) for _ in range(3)]

    found = [[(job.job_id, job.alone) for job in batch] for batch in batches]
    assert found == [[("a", False), ("b", True)], [("c", True)], [("d", False), ("e", False)]]


async def test_a_suspect_ends_the_batch_of_a_reclaim(queue: Queue, redis: Redis) -> None:
    await submit(queue, *map(make_job, "abcd"))
    await make_suspect(redis, queue, "b", "d")
    held = [job for _ in range(2) for job in await queue.claim(WORKER, 5)]
    await lapse(redis, queue, *(job.job_id for job in held))

    batches = [await queue.reclaim(OTHER, 5) for _ in range(2)]

    assert [[(job.job_id, job.alone) for job in batch] for batch in batches] == [
        [("a", False), ("b", True)],
        [("c", False), ("d", True)],
    ]


async def test_a_lease_that_lapses_before_the_job_is_begun_counts_nothing(queue: Queue, redis: Redis) -> None:
    job = await suspect(queue, redis)
    for number in range(2 * queue.settings.max_attempts):
        (job,) = await reclaim_after_lapse(redis, queue, A, f"w{number}")
        assert (job.alone, job.failures) == (True, queue.settings.max_attempts - 1)

    assert await queue.finish(f"w{number}", job.attempt, make_result(A)) is FinishOutcome.OK


async def test_a_lease_that_lapses_after_the_job_was_begun_buries_it(queue: Queue, redis: Redis) -> None:
    job = await suspect(queue, redis)
    assert await queue.begin(WORKER, A, job.attempt)

    assert await reclaim_after_lapse(redis, queue, A) == []

    assert (await only_result(queue, A)).status is Status.FAILED
    assert await alone_field(queue, redis) is None


async def test_progress_after_the_beginning_is_no_failure(queue: Queue, redis: Redis) -> None:
    job = await suspect(queue, redis)
    await queue.begin(WORKER, A, job.attempt)
    await queue.renew(WORKER, [renewal(job, 3)])

    (again,) = await reclaim_after_lapse(redis, queue, A)

    assert (again.alone, again.failures) == (True, job.failures)
    assert await alone_field(queue, redis) == b"held"


async def test_beginning_twice_is_beginning_once(queue: Queue, redis: Redis) -> None:
    """The reply to the first may have been lost."""
    job = await suspect(queue, redis)

    assert [await queue.begin(WORKER, A, job.attempt) for _ in range(2)] == [True, True]
    assert await alone_field(queue, redis) == b"begun"


async def test_beginning_proves_that_the_holder_lives(queue: Queue, redis: Redis) -> None:
    job = await suspect(queue, redis)
    await lapse(redis, queue, A)

    assert await queue.begin(WORKER, A, job.attempt)

    assert await queue.reclaim(OTHER, 5) == []
    assert await redis.zscore(queue.keys.leases, A) > (await redis.time())[0] * 1000 + LEASE * 500


async def test_a_zombie_begins_nothing(queue: Queue, redis: Redis) -> None:
    zombie = await suspect(queue, redis)
    (heir,) = await reclaim_after_lapse(redis, queue, A)

    assert not await queue.begin(WORKER, A, zombie.attempt)
    assert not await queue.begin(OTHER, A, zombie.attempt)
    assert not await queue.begin(WORKER, JobId("ghost"), 1)
    assert await alone_field(queue, redis) == b"held"
    assert await queue.begin(OTHER, A, heir.attempt)


async def test_two_processes_of_one_name_are_told_apart_by_the_attempt(queue: Queue, redis: Redis) -> None:
    """A name that is given twice, by a copied configuration perhaps, fences nothing."""
    old = await suspect(queue, redis)
    namesake = sibling(queue, redis)
    await lapse(redis, queue, A)
    (new,) = await namesake.reclaim(WORKER, 5)

    assert not await queue.begin(WORKER, A, old.attempt)
    assert (await queue.renew(WORKER, [renewal(old, 2)])).lost == {A}
    assert await queue.release(WORKER, [renewal(old)]) == {A}
    assert await queue.finish(WORKER, old.attempt, make_result(A, "old")) is FinishOutcome.LOST
    assert await alone_field(queue, redis) == b"held"

    assert await namesake.begin(WORKER, A, new.attempt)
    assert not (await namesake.renew(WORKER, [renewal(new, 2)])).lost
    assert await namesake.finish(WORKER, new.attempt, make_result(A, "new")) is FinishOutcome.OK
    assert await queue.finish(WORKER, old.attempt, make_result(A, "old")) is FinishOutcome.LOST
    assert (await only_result(queue, A)).text == "new"


async def test_a_namesake_does_not_get_the_jobs_of_the_others_lost_reply(queue: Queue, redis: Redis) -> None:
    await submit(queue, make_job("a"), make_job("b"))
    first = await queue.claim(WORKER, 1)

    second = await sibling(queue, redis).claim(WORKER, 1)

    assert [job.job_id for job in first + second] == ["a", "b"]


@pytest.mark.parametrize("begun", [False, True], ids=["held", "begun"])
async def test_a_worker_that_drains_gives_a_suspect_back_uncounted(
    queue: Queue, redis: Redis, begun: bool
) -> None:
    job = await suspect(queue, redis)
    for _ in range(2 * queue.settings.max_attempts):
        if begun:
            await queue.begin(WORKER, A, job.attempt)
        assert await queue.release(WORKER, [renewal(job)]) == frozenset()
        assert await alone_field(queue, redis) is None
        (job,) = await queue.claim(WORKER, 5)

    assert (job.alone, job.failures) == (True, queue.settings.max_attempts - 1)


async def test_a_suspect_can_be_cancelled_at_any_time(queue: Queue, redis: Redis) -> None:
    job = await suspect(queue, redis)

    assert await queue.cancel(A) is CancelOutcome.REQUESTED
    assert (await queue.renew(WORKER, [])).cancelled == {A}
    assert await queue.release(WORKER, [renewal(job)]) == frozenset()

    assert (await only_result(queue, A)).status is Status.CANCELLED
    assert await alone_field(queue, redis) is None


async def test_a_suspect_that_waits_is_no_suspect_to_others(queue: Queue, redis: Redis) -> None:
    """Only its holder has it; the line behind it goes on to other workers."""
    await suspect(queue, redis)
    await submit(queue, make_job("b"))

    (other,) = await queue.claim(OTHER, 5)

    assert (other.job_id, other.alone) == ("b", False)


@pytest.mark.parametrize("move", ["claim", "reclaim"])
async def test_a_repeat_says_again_that_it_must_run_alone(queue: Queue, redis: Redis, move: str) -> None:
    twin = sibling(queue, redis)
    twin._series = queue._series
    await submit(queue, make_job("a"))
    await make_suspect(redis, queue, "a")
    if move == "reclaim":
        await sibling(queue, redis).claim(WORKER, 1)
        await lapse(redis, queue, "a")

    lost = await getattr(twin, move)(OTHER, 5)

    assert timeless(await getattr(queue, move)(OTHER, 5)) == timeless(lost)
    assert [job.alone for job in lost] == [True]


async def test_a_job_that_need_not_run_alone_may_be_begun_too(queue: Queue, redis: Redis) -> None:
    job = await submit_and_claim(queue)

    assert not job.alone
    assert await queue.begin(WORKER, A, job.attempt)
    assert await alone_field(queue, redis) is None


@pytest.mark.parametrize(("max_attempts", "alone"), [(1, [False]), (2, [False, True])], ids=str)
async def test_which_attempts_are_alone_follows_from_how_many_there_are(
    queue: Queue, redis: Redis, max_attempts: int, alone: list[bool]
) -> None:
    """With one attempt there is none that could be made alone."""
    queue = sibling(queue, redis, max_attempts=max_attempts)
    job = await submit_and_claim(queue)
    seen = [job.alone]
    while found := await reclaim_after_lapse(redis, queue, A, WORKER):
        (job,) = found
        seen.append(job.alone)
        await queue.begin(WORKER, A, job.attempt)

    assert seen == alone
    view = await queue.status(A)
    assert view is not None
    assert (view.state, view.failures) == (JobState.DONE, max_attempts)


async def fail(queue: Queue, redis: Redis, job: Claimed, finder: Queue) -> list[Claimed]:
    """Let a holder be lost with its job, and say who may go on: at once, or after the backoff."""
    if job.alone:
        await queue.begin(WORKER, A, job.attempt)
    await lapse(redis, queue, A)
    found = await finder.reclaim(WORKER, 5)
    if await redis.zcard(queue.keys.delayed):
        await make_due(redis, queue, A)
        found = await finder.claim(WORKER, 5)
    return found


async def test_who_allows_fewer_attempts_buries_nothing_that_did_not_run_alone(
    queue: Queue, redis: Redis
) -> None:
    """Settings are each worker's own, and need not be the same while they are being changed."""
    generous, strict = sibling(queue, redis, max_attempts=5), sibling(queue, redis, max_attempts=2)
    job = await submit_and_claim(generous)
    for failures in (1, 2, 3):
        (job,) = await fail(generous, redis, job, generous)
        assert (job.alone, job.failures) == (False, failures)

    (job,) = await fail(generous, redis, job, strict)

    assert (job.alone, job.failures) == (True, 4)
    assert await fail(strict, redis, job, strict) == []
    (letter,) = await queue.dead_letters()
    assert letter.failures == 5


async def test_a_released_job_that_failed_too_often_for_its_next_holder_runs_alone(
    queue: Queue, redis: Redis
) -> None:
    generous, strict = sibling(queue, redis, max_attempts=5), sibling(queue, redis, max_attempts=2)
    job = await submit_and_claim(generous)
    for _ in range(3):
        (job,) = await fail(generous, redis, job, generous)
    await generous.release(WORKER, [renewal(job)])

    (job,) = await strict.claim(WORKER, 5)

    assert (job.alone, job.failures) == (True, 3)
    assert await strict.finish(WORKER, job.attempt, make_result(A)) is FinishOutcome.OK


async def test_workers_that_allow_different_numbers_of_attempts_come_to_an_end(
    queue: Queue, redis: Redis
) -> None:
    """Who ran alone is buried by whoever finds that, however many attempts that one would have allowed."""
    others = [sibling(queue, redis, max_attempts=number) for number in (4, 2, 3)]
    job, alone = await submit_and_claim(queue), 0
    for queue_of_holder, finder in zip(others, [*others[1:], *others[:1]], strict=True):
        alone += job.alone
        found = await fail(queue_of_holder, redis, job, finder)
        if not found:
            break
        (job,) = found

    assert alone == 1
    assert (await only_result(queue, A)).status is Status.FAILED


async def test_what_lapses_before_and_after_the_beginning_is_told_by_the_servers_clock(
    queue: Queue, redis: Redis
) -> None:
    quick = sibling(queue, redis, lease=0.05)
    job = await suspect(quick, redis)
    await asyncio.sleep(0.06)
    (job,) = await quick.reclaim(OTHER, 5)
    assert job.alone
    await quick.begin(OTHER, A, job.attempt)
    await asyncio.sleep(0.06)

    assert await quick.reclaim(WORKER, 5) == []
    assert (await only_result(queue, A)).status is Status.FAILED
