"""The server restarts, forgets, fills up, or hides behind a broken wire; nothing is lost or doubled.

These tests own their servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tests.tidemill.audit import Audit
from tests.tidemill.factories import (
    OTHER,
    REPLY,
    WORKER,
    lapse,
    make_deltas,
    make_job,
    make_report,
    make_result,
    make_settings,
    only_result,
    renewal,
    sibling,
    submit,
    submit_and_claim,
)
from tests.tidemill.proxy import Proxy, proxy_to
from tests.tidemill.servers import Server, redis_binary, running, valkey_binary
from tidemill.connection import connect
from tidemill.errors import QueueUnavailable
from tidemill.jobs import JobId
from tidemill.moves import FinishOutcome, RenewOutcome, Submitted
from tidemill.queue import Queue
from tidemill.scripts import load_scripts

A = JobId("a")


@contextmanager
def own_server(kind: str, *options: str) -> Iterator[Server]:
    binary = {"valkey": valkey_binary, "redis": redis_binary}[kind]()
    with running(binary, *options) as server:
        yield server


@asynccontextmanager
async def queue_at(url: str, name: str = "q") -> AsyncIterator[Queue]:
    redis = connect(url)
    queue = Queue(redis, name, make_settings())
    try:
        yield queue
    finally:
        await queue.aclose()
        await redis.aclose()


# the server


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_a_full_server_refuses_new_jobs_and_can_be_emptied(kind: str) -> None:
    """Without allow-oom a full server could never be emptied."""
    with own_server(kind, "--maxmemory", "100mb", "--maxmemory-policy", "noeviction") as server:
        async with queue_at(server.url) as queue:
            await submit(queue, *(make_job(name, deadline=1000) for name in ("a", "b", "c", "d", "e")))
            held = {job.job_id: job for job in await queue.claim(WORKER, 4)}
            with server.client() as client:
                client.config_set("maxmemory", "1")

            with pytest.raises(QueueUnavailable, match="out of memory"):
                await queue.submit([make_job("f")], reply_to=REPLY)
            assert await queue.renew(WORKER, [renewal(held[A], 2)]) == RenewOutcome()
            assert await queue.finish(WORKER, 1, make_result("a")) is FinishOutcome.OK
            await queue.cancel(JobId("b"))
            assert (await queue.renew(WORKER, [renewal(held[JobId("b")])])).cancelled == {"b"}
            await queue.finish(WORKER, 1, make_result("b"))
            await queue.release(WORKER, [renewal(held[JobId("c")])])
            assert await queue.cancel(JobId("c")) == "cancelled"
            assert await queue.cancel(JobId("e")) == "cancelled"
            await queue.finish(WORKER, 1, make_result("d"))

            depth = await queue.depth()
            assert depth.total + depth.running == 0
            with server.client() as client:
                client.config_set("maxmemory", "0")
                assert Audit(client, queue.keys.prefix).run() == []


async def test_scripts_come_back_after_a_flush(valkey: Server, queue_name: str) -> None:
    """groupmq#16: NOSCRIPT until the restart, while PING stayed green."""
    async with queue_at(valkey.url, queue_name) as queue:
        await submit(queue, make_job("a"))
        with valkey.client() as client:
            client.script_flush()
        assert await queue.submit([make_job("a"), make_job("b")], reply_to=REPLY) == ["live", "created"]
        with valkey.client() as client:
            client.script_flush()
        for claimed in await queue.claim(WORKER, 5):
            assert await queue.finish(WORKER, claimed.attempt, make_result(claimed.job_id)) == "ok"


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_a_killed_server_with_its_data_loses_nothing_and_steals_nothing(kind: str) -> None:
    """Idle time ran on while the server was down: 5 of 5 live jobs were stolen at its start."""
    with own_server(kind, "--appendonly", "yes", "--appendfsync", "always") as server:
        async with queue_at(server.url) as queue:
            await submit(queue, *(make_job(name) for name in "abc"))
            first, second = await queue.claim(WORKER, 2)
            await queue.renew(WORKER, [renewal(first, 2)])
            await queue.finish(WORKER, second.attempt, make_result("b"))
            with server.client() as client:
                client.zadd(queue.keys.leases, {"a": 1})

            server.kill()
            with pytest.raises(QueueUnavailable, match="cannot be reached"):
                await queue.renew(WORKER, [renewal(first, 2, 1)])
            server.start()

            assert await queue.reclaim(OTHER, 5) == []
            assert await sibling(queue, queue._link.redis).reclaim(OTHER, 5) == []
            assert await queue.renew(WORKER, [renewal(first, 2, 1)]) == RenewOutcome()
            assert await queue.finish(WORKER, second.attempt, make_result("b")) is FinishOutcome.ALREADY
            assert [job.job_id for job in await queue.claim(OTHER, 5)] == ["c"]
            assert await queue.finish(WORKER, first.attempt, make_result("a")) is FinishOutcome.OK
            with server.client() as client:
                assert Audit(client, queue.keys.prefix).run() == []


async def test_a_server_that_has_lost_its_data_begins_anew(valkey: Server) -> None:
    with own_server("valkey") as server:
        async with queue_at(server.url) as queue:
            claimed = await submit_and_claim(queue)
            server.kill()
            server.start()

            assert (await queue.renew(WORKER, [renewal(claimed)])).lost == {A}
            assert await queue.finish(WORKER, 1, make_result("a")) is FinishOutcome.LOST
            assert await queue.submit([make_job("a")], reply_to=REPLY) == [Submitted.CREATED]


async def test_a_waiter_lives_through_a_restart() -> None:
    """celery#8030, bullmq#4484: the process lived and consumed nothing more."""
    with own_server("valkey") as server:
        async with queue_at(server.url) as queue:
            waiter = asyncio.create_task(queue.wait(2))
            await asyncio.sleep(0.1)
            server.kill()
            with pytest.raises(QueueUnavailable):
                await asyncio.wait_for(waiter, 3)
            server.start()
            await submit(queue, make_job("a"))
            await asyncio.wait_for(queue.wait(2), 1)


# the wire


async def test_no_reclaim_within_a_lease_of_ones_own_reconnect(valkey: Server, queue_name: str) -> None:
    """The holders of lapsed leases may have been cut off by the same outage."""
    now = 0.0
    async with proxy_to(valkey.port) as proxy, queue_at(proxy.url, queue_name) as ordinary:
        queue = Queue(ordinary._link.redis, queue_name, ordinary.settings, clock=lambda: now)
        await submit_and_claim(queue)
        async with queue_at(valkey.url, queue_name) as direct:
            await lapse(direct._link.redis, queue, "a")
        proxy.cut()
        for _ in range(2):
            with pytest.raises(QueueUnavailable):
                await queue.reclaim(OTHER, 5)
        proxy.mend()

        assert await queue.reclaim(OTHER, 5) == []
        now += queue.settings.lease / 2
        assert await queue.reclaim(OTHER, 5) == []
        now += queue.settings.lease
        assert [job.job_id for job in await queue.reclaim(OTHER, 5)] == ["a"]


async def test_no_reclaim_within_a_lease_of_a_time_in_which_nothing_could_be_written(
    valkey: Server, queue_name: str
) -> None:
    """Their holders were refused their renewals as well."""
    now = 0.0
    async with queue_at(valkey.url, queue_name) as ordinary:
        queue = Queue(ordinary._link.redis, queue_name, ordinary.settings, clock=lambda: now)
        await submit_and_claim(queue)
        await lapse(queue._link.redis, queue, "a")
        with pytest.raises(QueueUnavailable):
            async with queue._link.reachable():
                raise ResponseError("MISCONF Redis is configured to save snapshots, but cannot")

        assert await queue.reclaim(OTHER, 5) == []
        assert await queue._link.redis.exists(queue.keys.server), "known by then"
        now += 1.5 * queue.settings.lease
        assert [job.job_id for job in await queue.reclaim(OTHER, 5)] == ["a"]


@asynccontextmanager
async def losing_replies(proxy: Proxy) -> AsyncIterator[None]:
    """Both the command and redis-py's one repeat of it are done, and neither reply arrives."""
    proxy.lose_replies()
    with pytest.raises(QueueUnavailable):
        yield
    proxy.mend()


async def test_every_move_may_lose_its_reply_and_be_repeated(valkey: Server, queue_name: str) -> None:
    """One lost reply made XADD twice; a lost read left an entry pending and unseen."""
    async with proxy_to(valkey.port) as proxy, queue_at(proxy.url, queue_name) as queue:
        for script in load_scripts().values():  # or it is the reply "unknown script" that is lost
            await queue._link.redis.script_load(script.source)
        async with losing_replies(proxy):
            await queue.submit([make_job("a"), make_job("b")], reply_to=REPLY)
        outcomes = await queue.submit([make_job("a"), make_job("b")], reply_to=REPLY)
        assert set(outcomes) == {Submitted.LIVE}

        async with losing_replies(proxy):
            await queue.claim(WORKER, 1)
        (claimed,) = await queue.claim(WORKER, 1)
        assert (claimed.job_id, claimed.attempt) == ("a", 1)

        async with losing_replies(proxy):
            await queue.renew(WORKER, [renewal(claimed, 2)])
        assert await queue.renew(WORKER, [renewal(claimed, 2, 1)]) == RenewOutcome()

        async with losing_replies(proxy):
            await queue.release(WORKER, [renewal(claimed, 1, start=3)])
        assert await queue.release(WORKER, [renewal(claimed, 1, start=3)]) == frozenset()

        again, other = await queue.claim(WORKER, 2)
        assert again.checkpoint == make_deltas(2, 1, 1)
        async with losing_replies(proxy):
            await queue.begin(WORKER, again.job_id, again.attempt)
        assert await queue.begin(WORKER, again.job_id, again.attempt)
        async with losing_replies(proxy):
            await queue.finish(WORKER, again.attempt, make_result("a"))
        assert await queue.finish(WORKER, again.attempt, make_result("a")) is FinishOutcome.ALREADY
        assert await only_result(queue, "a") == make_result("a")

        async with losing_replies(proxy):
            await queue.cancel(JobId("b"))
        assert await queue.cancel(JobId("b")) == "requested"
        async with losing_replies(proxy):
            await queue.renew(WORKER, [])
        assert (await queue.renew(WORKER, [renewal(other)])).cancelled == {"b"}

        async with losing_replies(proxy):
            await queue.report(make_report())
        assert [view.report for view in await queue.workers()] == [make_report()]


async def test_a_cancelled_call_leaves_nothing_for_the_next_one(valkey: Server, queue_name: str) -> None:
    """redis-py#2624: after a cancelled command the next caller got its reply."""
    async with queue_at(valkey.url, queue_name) as queue:
        await submit(queue, *(make_job(f"j{i}") for i in range(20)))
        seen: list[str] = []
        for steps in range(20):
            call = asyncio.create_task(queue.claim(WORKER, 1))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            (outcome,) = await asyncio.gather(call, return_exceptions=True)
            claimed = [] if isinstance(outcome, BaseException) else outcome
            claimed += await queue.claim(WORKER, 1)
            seen += [job.job_id for job in claimed]
        seen += [job.job_id for job in await queue.claim(WORKER, 20)]

        assert sorted(seen) == sorted(f"j{i}" for i in range(20))


async def test_a_wrong_password_says_so() -> None:
    with own_server("valkey", "--requirepass", "secret") as server:
        for credentials in ("", ":wrong@"):
            url = server.url.replace("//", f"//{credentials}")
            async with queue_at(url) as queue:
                with pytest.raises(QueueUnavailable, match="refuses the credentials") as caught:
                    await queue.ping()
            assert "wrong" not in str(caught.value).split("credentials")[0]
        async with queue_at(server.url.replace("//", "//:secret@")) as queue:
            await submit(queue, make_job("a"))


async def test_a_replica_says_so(valkey: Server) -> None:
    """redis-py#460, #435: a demoted primary was asked again and again."""
    with own_server("valkey", "--replicaof", "127.0.0.1", str(valkey.port)) as server:
        async with queue_at(server.url) as queue:
            with pytest.raises(QueueUnavailable, match="read-only replica"):
                await queue.submit([make_job("a")], reply_to=REPLY)
            with server.client() as client:
                client.replicaof("NO", "ONE")
            await submit(queue, make_job("a"))


async def test_nobody_listening_says_so(unused_tcp_port: int) -> None:
    async with queue_at(f"redis://127.0.0.1:{unused_tcp_port}/0") as queue:
        with pytest.raises(QueueUnavailable, match=f"127.0.0.1:{unused_tcp_port} cannot be reached"):
            await queue.ping()
        with pytest.raises(QueueUnavailable):
            await queue.claim(WORKER, 1)


async def test_redis_is_not_written_to_by_reading(valkey: Server, queue_name: str) -> None:
    async with queue_at(valkey.url, queue_name) as queue:
        await queue.depth()
        await queue.status(A)
        await queue.results(REPLY)
        await queue.deltas(A)
        await queue.expire()
        redis: Redis = queue._link.redis
        assert await redis.keys(f"{queue.keys.prefix}*") == []
