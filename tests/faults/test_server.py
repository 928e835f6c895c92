"""The server restarts, loads, fills up, turns read-only or forgets its scripts, and keeps its data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from tests.e2e.polling import until
from tests.faults.factories import PATIENCE, Place, make_job, make_jobs, open_own_place, open_place
from tests.faults.invariants import Answers, assert_delivered, assert_undisturbed
from tests.faults.kinds_of_server import KINDS, LASTING, server_of
from tests.tidemill.proxy import Proxy, proxy_to
from tests.tidemill.servers import Server
from tidemill.errors import QueueUnavailable
from tidemill.moves import QueueSettings

SLOW_LOADING = ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
"""Microseconds that each key takes to load, and after how many bytes clients are told of it."""
OUTAGE = 0.5
FLUSHES = 25
FAILURES = "tidemill_redis_failures_total"
LONG_LEASE = 6.0
"""So long that a worker which may renew again surely does so before it has passed once more."""


@pytest.fixture(scope="module", params=KINDS)
def lasting_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One of each kind, which keeps its data."""
    with server_of(request.param, *LASTING) as server:
        yield server


@pytest.fixture
async def busy(lasting_server: Server, model: Path, tmp_path: Path) -> AsyncIterator[Place]:
    """Two workers amid more jobs than they can hold."""
    async with open_place(lasting_server, model, tmp_path) as place:
        workers = [await place.start_ready() for _ in range(2)]
        await place.submit(*make_jobs(30, params={"max_tokens": 160}))
        await until(lambda: all(worker.health()["running"] for worker in workers), timeout=PATIENCE)
        yield place


def assert_not_over(place: Place) -> None:
    assert len(place.answered_ids()) < len(place.submitted), "all was over before the fault was"


async def assert_rode_out(place: Place, answers: Answers) -> None:
    """All is answered, and no worker had to end for it."""
    jobs = list(place.submitted.values())
    await assert_undisturbed(place, jobs, answers)
    await assert_delivered(place)
    assert [worker.wait(0) for worker in place.workers.started if not worker.is_alive] == []


async def test_restarts_and_loads(busy: Place, answers: Answers) -> None:
    """Killed, killed again as soon as it is back, and then slow to load what it has kept."""
    server = busy.server
    await compact(server)
    server.kill()
    server.start()
    server.kill()
    options, server.options = server.options, server.options + SLOW_LOADING
    try:
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        await until(lambda: is_loading(server), timeout=PATIENCE)
        await starting
    finally:
        server.options = options
    assert_not_over(busy)
    await assert_rode_out(busy, answers)


async def compact(server: Server) -> None:
    """Let it rewrite its append-only file, as it does by itself now and then: keys instead of commands."""
    with server.client() as client:
        client.bgrewriteaof()
        await until(lambda: not is_rewriting(client), timeout=PATIENCE)


def is_rewriting(client: redis.Redis) -> bool:
    persistence = client.info("persistence")
    return bool(persistence["aof_rewrite_in_progress"] or persistence["aof_rewrite_scheduled"])


def is_loading(server: Server) -> bool:
    try:
        with server.client() as client:
            client.ping()
    except redis.BusyLoadingError:
        return True
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    raise AssertionError("it was loaded before anybody could look")


async def test_forgets_its_scripts(busy: Place, answers: Answers) -> None:
    """Flushed over and over, as by whoever takes them for a cache."""
    with busy.redis() as server:
        for _ in range(FLUSHES):
            server.script_flush()
            await asyncio.sleep(0.04)
    await assert_rode_out(busy, answers)


async def test_turns_read_only_and_back(busy: Place, answers: Answers) -> None:
    """A primary that was demoted by mistake: nothing can be written, nothing is lost."""
    with busy.redis() as server:
        server.replicaof("127.0.0.1", 1)  # where nobody listens
        with pytest.raises(QueueUnavailable, match="read-only"):
            await busy.client.submit(make_job())
        await asyncio.sleep(OUTAGE)
        server.replicaof("NO", "ONE")
    assert_not_over(busy)
    await assert_rode_out(busy, answers)


async def test_runs_out_of_memory(busy: Place, answers: Answers) -> None:
    """Nothing is submitted or claimed any more; what is held is finished, and its results are recorded."""
    with busy.redis() as server:
        server.config_set("maxmemory", "1")
        try:
            with pytest.raises(QueueUnavailable, match="out of memory"):
                await busy.client.submit(make_job())
            for worker in busy.workers.alive:
                await until(lambda: worker.health()["held"] == 0, timeout=PATIENCE)  # noqa: B023  # awaited here
                await until(lambda: worker.metric(FAILURES) > 0, timeout=PATIENCE)  # noqa: B023  # the same
            num_answered = len(busy.answered_ids())
            assert num_answered >= 2
            await asyncio.sleep(OUTAGE)
            assert len(busy.answered_ids()) == num_answered
        finally:
            server.config_set("maxmemory", "0")
    assert_not_over(busy)
    await assert_rode_out(busy, answers)


async def test_leases_that_ran_out_while_it_was_away(model: Path, tmp_path: Path, answers: Answers) -> None:
    """Nobody could renew: the jobs stay their holder's, even if that comes back later than another one."""
    settings = QueueSettings(lease=LONG_LEASE)
    async with (
        open_own_place("redis", model, tmp_path, *LASTING, settings=settings, lease=LONG_LEASE) as place,
        proxy_to(place.server.port) as proxy,
    ):
        await take_over_too_early(place, proxy, answers)


async def take_over_too_early(place: Place, proxy: Proxy, answers: Answers) -> None:
    other = await place.start_ready()
    other.freeze()
    holder = await place.start_ready(redis_url=proxy.url)
    jobs = make_jobs(6, params={"max_tokens": 300})
    await place.submit(*jobs)
    await place.under_way(jobs, holder)
    proxy.cut()
    place.server.kill()
    holder.freeze()
    await asyncio.sleep(LONG_LEASE)
    place.server.start()
    other.thaw()
    witness = make_job()
    await place.submit(witness)
    await place.results([witness])  # by now the other one has looked for what it might reclaim
    holder.thaw()
    proxy.mend()

    results = await assert_undisturbed(place, jobs, answers)

    assert all(result.attempts == 1 and holder.holds(result.worker) for result in results)
    assert other.is_alive
    await assert_delivered(place)
