"""A full server is drained, and results that nobody reads cannot grow without bound.

These tests own their servers.
"""

from __future__ import annotations

import asyncio
import math
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
    make_result,
    make_settings,
    renewal,
    sibling,
    submit,
    timeless,
)
from tests.tidemill.servers import Server, redis_binary, running, valkey_binary
from tidemill.connection import connect
from tidemill.errors import ConfigurationError, QueueUnavailable
from tidemill.jobs import JobId
from tidemill.moves import CancelOutcome, FinishOutcome, QueueSettings, RenewOutcome
from tidemill.queue import Queue

LONG = "x" * 100_000
"""The text of a result; some of them fill what these servers have."""
BALLAST = 30_000_000
"""Bytes. Beside them, what connections and scripts take now and then is little."""


@pytest.fixture(scope="module", params=["valkey", "redis"])
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    binary = {"valkey": valkey_binary, "redis": redis_binary}[request.param]()
    with running(binary, "--maxmemory-policy", "noeviction") as server:
        server.await_uptime(math.ceil(LEASE))
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


async def test_a_server_that_is_just_full_is_drained(queue: Queue, client: redis.Redis) -> None:
    await submit(queue, *map(make_job, "abc"))
    hold(client, 1.05)

    with pytest.raises(QueueUnavailable, match="out of memory"):
        await queue.submit([make_job("d")], reply_to=REPLY)
    for claimed in await queue.claim(WORKER, 3):
        assert await queue.finish(WORKER, claimed.attempt, make_result(claimed.job_id)) is FinishOutcome.OK

    assert len(await queue.results(REPLY)) == 3


async def test_a_server_beyond_its_overdraft_hands_out_no_job(queue: Queue, client: redis.Redis) -> None:
    await submit(queue, *map(make_job, "abc"))
    await queue.claim(WORKER, 1)
    await lapse(queue._link.redis, queue, "a")
    hold(client, 1.2)

    with pytest.raises(QueueUnavailable, match="out of memory"):
        await queue.claim(WORKER, 1)
    with pytest.raises(QueueUnavailable, match="out of memory"):
        await queue.reclaim(OTHER, 1)

    hold(client, 1.05)
    assert [job.job_id for job in await queue.reclaim(OTHER, 1)] == ["a"]
    assert [job.job_id for job in await queue.claim(WORKER, 1)] == ["b"]


async def test_how_far_it_may_be_overdrawn_is_a_setting(queue: Queue, client: redis.Redis) -> None:
    generous = sibling(queue, queue._link.redis, memory_overdraft=0.5)
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
