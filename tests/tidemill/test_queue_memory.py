"""A full server is drained, and results that nobody reads cannot grow without bound.

These tests own their servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from tests.tidemill.audit import Audit
from tests.tidemill.factories import (
    LEASE,
    OTHER,
    REPLY,
    WORKER,
    lapse,
    make_job,
    make_late,
    make_result,
    make_settings,
    make_suspect,
    only_result,
    renewal,
    sibling,
    submit,
    timeless,
)
from tests.tidemill.servers import Server, redis_binary, running, valkey_binary
from tidemill.connection import connect
from tidemill.errors import ConfigurationError, QueueUnavailable
from tidemill.jobs import Delta, Job, JobId, Status
from tidemill.moves import CancelOutcome, FinishOutcome, JobState, QueueSettings, Renewal, RenewOutcome
from tidemill.queue import Queue

LONG = "x" * 100_000
"""The text of a result; some of them fill what these servers have."""
BALLAST = 30_000_000
"""Bytes. Beside them, what connections and scripts take now and then is little."""
UNREAD = 60
"""Results so long that they take more than a tenth of that."""


@pytest.fixture(scope="module", params=["valkey", "redis"])
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    binary = {"valkey": valkey_binary, "redis": redis_binary}[request.param]()
    with running(binary, "--maxmemory-policy", "noeviction") as server:
        server.await_uptime(LEASE)
        yield server


@pytest.fixture
def client(own_server: Server) -> Iterator[redis.Redis]:
    with own_server.client() as client:
        yield client
        client.config_set("maxmemory", "0")


@pytest.fixture
async def queue(own_server: Server, client: redis.Redis, queue_name: str) -> AsyncIterator[Queue]:
    client.setrange("ballast", BALLAST, "x")  # made by the server: sent, it would be in buffers for a while
    connection = connect(own_server.url)
    made = Queue(connection, queue_name, make_settings())
    yield made
    await made.aclose()
    await connection.aclose()
    client.config_set("maxmemory", "0")
    assert Audit(client, made.keys.prefix).run() == []
    client.flushall()


def hold(client: redis.Redis, share: float) -> None:
    """Let the server hold this share of the memory that it may."""
    client.config_set("maxmemory", int(client.info("memory")["used_memory"] / share))


async def leave_unread(queue: Queue) -> None:
    """Answer jobs at such length that the results take up the overdraft."""
    await submit(queue, *(make_job(f"unread-{i}") for i in range(UNREAD)))
    for job in await queue.claim("talker", UNREAD):
        await queue.finish("talker", job.attempt, make_result(job.job_id, LONG))


async def test_a_server_that_is_just_full_is_drained(queue: Queue, client: redis.Redis) -> None:
    await submit(queue, *map(make_job, "abc"))
    hold(client, 1.05)

    with pytest.raises(QueueUnavailable, match="out of memory"):
        await queue.submit([make_job("d")], reply_to=REPLY)
    for claimed in await queue.claim(WORKER, 3):
        assert await queue.finish(WORKER, claimed.attempt, make_result(claimed.job_id)) is FinishOutcome.OK

    assert len(await queue.results(REPLY)) == 3


async def test_a_server_that_unread_results_fill_hands_out_no_job(queue: Queue, client: redis.Redis) -> None:
    await leave_unread(queue)
    await submit(queue, *map(make_job, "abc"))
    await queue.claim(WORKER, 1)
    await lapse(queue._link.redis, queue, "a")
    hold(client, 1.2)

    with pytest.raises(QueueUnavailable, match="out of memory"):
        await queue.claim(WORKER, 1)
    assert await queue.reclaim(OTHER, 1) == []
    with pytest.raises(QueueUnavailable, match="out of memory"):
        await queue.claim(OTHER, 1)

    hold(client, 1.05)
    assert [job.job_id for job in await queue.claim(OTHER, 1)] == ["a"]
    assert [job.job_id for job in await queue.claim(WORKER, 1)] == ["b"]


async def test_how_far_it_may_be_overdrawn_is_a_setting(queue: Queue, client: redis.Redis) -> None:
    generous = sibling(queue, queue._link.redis, memory_overdraft=0.5)
    await leave_unread(queue)
    await submit(queue, make_job("a"))
    hold(client, 1.2)

    with pytest.raises(QueueUnavailable):
        await queue.claim(WORKER, 1)
    assert len(await generous.claim(WORKER, 1)) == 1


def test_an_overdraft_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="memory_overdraft must be greater than 0"):
        QueueSettings(memory_overdraft=-0.1)


async def test_what_frees_memory_goes_on_beyond_the_overdraft(queue: Queue, client: redis.Redis) -> None:
    await submit(queue, *map(make_job, "abcd"))
    a, b, c = await queue.claim(WORKER, 3)
    hold(client, 2.0)

    assert await queue.renew(WORKER, [renewal(a, 2)]) == RenewOutcome()
    assert await queue.begin(WORKER, a.job_id, a.attempt)
    assert await queue.finish(WORKER, a.attempt, make_result("a")) is FinishOutcome.OK
    assert await queue.cancel(JobId("b")) is CancelOutcome.REQUESTED
    assert (await queue.renew(WORKER, [])).cancelled == {"b"}
    assert await queue.release(WORKER, [renewal(b), renewal(c)]) == frozenset()
    assert await queue.cancel(JobId("d")) is CancelOutcome.CANCELLED


async def test_a_worker_that_finds_nothing_to_do_is_not_refused(queue: Queue, client: redis.Redis) -> None:
    hold(client, 2.0)

    assert await queue.claim(WORKER, 5) == []
    assert await queue.reclaim(WORKER, 5) == []


@pytest.mark.parametrize("move", ["claim", "reclaim"])
async def test_the_repeat_of_a_lost_reply_is_answered_by_a_full_server_too(
    queue: Queue, client: redis.Redis, move: str
) -> None:
    """Else the jobs of that reply would be held by a worker that does not know of them."""
    twin = sibling(queue, queue._link.redis)
    twin._series = queue._series
    await submit(queue, make_job("a"))
    if move == "reclaim":
        await queue.claim(WORKER, 1)
        await lapse(queue._link.redis, queue, "a")
    lost = await getattr(twin, move)(OTHER, 1)
    hold(client, 2.0)

    assert timeless(await getattr(queue, move)(OTHER, 1)) == timeless(lost) != []


async def test_a_refused_claim_is_the_same_claim_when_it_is_repeated(
    queue: Queue, client: redis.Redis
) -> None:
    await leave_unread(queue)
    await submit(queue, *map(make_job, "ab"))
    hold(client, 2.0)
    for _ in range(3):
        with pytest.raises(QueueUnavailable):
            await queue.claim(WORKER, 1)
    client.config_set("maxmemory", "0")

    assert [job.job_id for job in await queue.claim(WORKER, 1)] == ["a"]
    assert [job.job_id for job in await queue.claim(WORKER, 1)] == ["b"]


async def work(queue: Queue) -> int:
    """Answer jobs at length until there are none, or none is handed out; returns how many."""
    answered = 0
    while True:
        try:
            claimed = await queue.claim(WORKER, 1)
        except QueueUnavailable:
            return answered
        if not claimed:
            return answered
        for job in claimed:
            await queue.finish(WORKER, job.attempt, make_result(job.job_id, LONG))
            answered += 1


async def test_results_that_nobody_reads_are_bounded_and_work_goes_on_once_they_are_read(
    queue: Queue, client: redis.Redis
) -> None:
    num_jobs, room = 100, 10 * len(LONG)
    await submit(queue, *(make_job(f"j{i}") for i in range(num_jobs)))
    limit = client.info("memory")["used_memory"] + room
    client.config_set("maxmemory", limit)

    answered: list[int] = []
    while sum(answered) < num_jobs:
        answered.append(await work(queue))
        assert client.info("memory")["used_memory"] < limit * 1.1 + 4 * len(LONG)
        results = await asyncio.wait_for(queue.results(REPLY), 5)
        assert len(results) == answered[-1] > 0, "work goes on once results are acknowledged"
        await queue.acknowledge(REPLY, [entry for entry, _ in results])

    assert len(answered) > 1
    depth = await queue.depth()
    assert depth.total + depth.running == 0


# a server that jobs fill


def long_job(job_id: str, **fields: object) -> Job:
    return make_job(job_id, prompt=LONG, **fields)


def is_overdrawn(client: redis.Redis) -> bool:
    memory = client.info("memory")
    return bool(memory["used_memory"] - memory["mem_not_counted_for_evict"] > 1.1 * memory["maxmemory"])


async def test_a_server_that_jobs_fill_and_nobody_holds_is_drained_one_by_one(
    queue: Queue, client: redis.Redis
) -> None:
    """Nothing else would ever free its memory: payloads and checkpoints go with their job only."""
    names = [f"j{i}" for i in range(12)]
    await submit(queue, *map(long_job, names))
    for held in await queue.claim("lost", 6):
        checkpoint = (Delta(index=0, token_ids=(0,), text=LONG),)
        await queue.renew("lost", [Renewal(held.job_id, held.attempt, checkpoint)])
        await lapse(queue._link.redis, queue, held.job_id)
    hold(client, 1.25)

    for num_left in reversed(range(len(names))):
        (job,) = await queue.reclaim(OTHER, 5) or await queue.claim(OTHER, 5)
        assert await queue.reclaim(WORKER, 5) == []
        if num_left:
            with pytest.raises(QueueUnavailable, match="out of memory"):
                await queue.claim(WORKER, 5)
        assert is_overdrawn(client)
        assert await queue.finish(OTHER, job.attempt, make_result(job.job_id)) is FinishOutcome.OK

    assert sorted(result.id for _, result in await queue.results(REPLY)) == sorted(names)
    assert await queue.claim(OTHER, 5) == []


async def test_a_lost_holder_does_not_keep_a_full_server_shut(queue: Queue, client: redis.Redis) -> None:
    await submit(queue, long_job("a"))
    for worker in ("w1", "w2", "w3"):
        hold(client, 1.2)
        (job,) = await queue.reclaim(worker, 5) or await queue.claim(worker, 5)
        await queue.renew(worker, [renewal(job, 1, start=len(job.checkpoint))])
        client.config_set("maxmemory", "0")  # or the test itself could not write
        await lapse(queue._link.redis, queue, "a")
    hold(client, 1.2)

    (job,) = await queue.reclaim(OTHER, 5)

    assert (job.attempt, job.failures, len(job.checkpoint)) == (4, 0, 3)


async def test_what_a_full_server_is_drained_into_is_bounded_too(queue: Queue, client: redis.Redis) -> None:
    num_jobs = 80
    await submit(queue, *(make_job(f"j{i}") for i in range(num_jobs)))
    hold(client, 1.2)
    allowed = client.info("memory")["maxmemory"] // 10

    answered: list[int] = []
    while sum(answered) < num_jobs:
        answered.append(await work(queue))
        assert answered[-1] * len(LONG) <= allowed + len(LONG)
        results = await queue.results(REPLY)
        assert len(results) == answered[-1] > 0, "work goes on once results are acknowledged"
        await queue.acknowledge(REPLY, [entry for entry, _ in results])

    assert len(answered) > 1
    assert is_overdrawn(client)


async def test_what_needs_no_worker_is_answered_by_a_full_server_too(
    queue: Queue, client: redis.Redis
) -> None:
    connection = queue._link.redis
    await leave_unread(queue)
    await submit(queue, make_job("cancelled"), make_job("late", deadline=1000), make_job("lost"))
    await submit(queue, make_job("suspect"), make_job("waiting", deadline=1000))
    await make_suspect(connection, queue, "suspect")
    (*_, lost, suspect) = await queue.claim(WORKER, 4)
    assert await queue.begin(WORKER, suspect.job_id, suspect.attempt)
    await queue.cancel(JobId("cancelled"))
    await make_late(connection, queue, "late")
    await make_late(connection, queue, "waiting")
    await lapse(connection, queue, "cancelled", "late", "lost", "suspect")
    hold(client, 1.2)

    assert await queue.reclaim(OTHER, 1) == []
    with pytest.raises(QueueUnavailable, match="out of memory"):
        await queue.claim(OTHER, 1)

    assert (await only_result(queue, "cancelled")).status is Status.CANCELLED
    assert (await only_result(queue, "late")).status is Status.EXPIRED
    assert (await only_result(queue, "waiting")).status is Status.EXPIRED
    assert (await only_result(queue, "suspect")).status is Status.FAILED
    view = await queue.status(lost.job_id)
    assert view is not None
    assert (view.state, view.worker, view.failures) == (JobState.WAITING, None, 1)
    assert await queue.cancel(lost.job_id) is CancelOutcome.CANCELLED


def questions(client: redis.Redis) -> int:
    calls: int = client.info("commandstats")["cmdstat_info"]["calls"]
    return calls


async def test_the_server_is_asked_once_a_call_how_full_it_is(queue: Queue, client: redis.Redis) -> None:
    await submit(queue, *(make_job(f"broken-{i}") for i in range(5)), make_job("a"))
    for i in range(5):
        client.hdel(queue.keys.job(JobId(f"broken-{i}")), "payload")
    before = questions(client)

    assert [job.job_id for job in await queue.claim(WORKER, 1)] == ["a"]

    assert questions(client) == before + 2  # the one before, and the claim's


async def readers(queue: Queue) -> set[str]:
    return {name.decode() for name in await queue._link.redis.zrange(queue.keys.readers, 0, -1)}


async def test_streams_that_have_nothing_to_read_are_not_looked_at_again(
    queue: Queue, client: redis.Redis
) -> None:
    for name in ("unread", "gone", "read"):
        await submit(queue, make_job(name), reply_to=name)
        (job,) = await queue.claim(WORKER, 1)
        await queue.finish(WORKER, job.attempt, make_result(name))
    client.delete(queue.keys.results("gone"))
    ((entry, _),) = await queue.results("read")
    await queue.acknowledge("read", [entry])
    await submit(queue, make_job("a"))
    assert await readers(queue) == {"unread", "gone", "read"}
    hold(client, 1.2)

    assert len(await queue.claim(WORKER, 1)) == 1

    assert await readers(queue) == {"unread"}
    client.config_set("maxmemory", "0")
    await submit(queue, make_job("b"), reply_to="read")
    await queue.cancel(JobId("b"))
    assert await readers(queue) == {"unread", "read"}


async def test_names_whose_stream_has_expired_go_as_new_ones_come(queue: Queue, client: redis.Redis) -> None:
    for i in range(6):
        await submit(queue, make_job(f"j{i}"), reply_to=f"r{i}")
        await queue.cancel(JobId(f"j{i}"))
        if i == 3:
            for name in ("r0", "r1", "r2"):
                client.delete(queue.keys.results(name))
                client.zadd(queue.keys.readers, {name: 1}, xx=True)

    assert await readers(queue) == {"r3", "r4", "r5"}
