"""Behind Sentinel: whoever is the primary is found, and work goes on by itself after a failover."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import pytest

from tests.tidemill.echo_worker import finish, open_queue
from tests.tidemill.factories import make_job
from tests.tidemill.server_sets import (
    SERVICE,
    SentinelSet,
    await_that,
    running_sentinel,
    running_sentinel_set,
)
from tests.tidemill.servers import Server, free_port, redis_binary, running, valkey_binary
from tidemill.client import Client, ClientSettings
from tidemill.connection import address_of, connect
from tidemill.discovery import queue_names
from tidemill.errors import JobUnknown, QueueUnavailable
from tidemill.jobs import JobId, Result
from tidemill.queue import Queue

T = TypeVar("T")

PAUSE = 0.02
PATIENCE = 20.0


class Traffic:
    """Somebody who submits, and a worker, each of whom goes on trying."""

    def __init__(self, client: Client, queue: Queue) -> None:
        self._client = client
        self._queue = queue
        self.results: dict[JobId, Result] = {}
        self.refusals: list[str] = []

    async def answer(self) -> None:
        while True:
            for claimed in await self._patiently(lambda: self._queue.claim("echo", 100)):
                await self._patiently(partial(finish, self._queue, claimed))
            await self._patiently(lambda: self._queue.wait(PAUSE))

    async def ask(self, job_id: JobId) -> None:
        """Submit a job and wait for its answer; a job that the failover lost is submitted again."""
        while job_id not in self.results:
            await self._patiently(lambda: self._client.submit(make_job(job_id, prompt=job_id)))
            with suppress(JobUnknown):
                self.results[job_id] = await self._client.result(job_id, timeout=PATIENCE)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except QueueUnavailable as refusal:
                self.refusals.append(str(refusal))
                await asyncio.sleep(PAUSE)


@asynccontextmanager
async def traffic_on(servers: SentinelSet) -> AsyncIterator[Traffic]:
    settings = ClientSettings(patience=PATIENCE)
    async with (
        Client(servers.url, queue="q", results="answers", settings=settings) as client,
        open_queue(servers.url, "q") as queue,
        asyncio.TaskGroup() as group,
    ):
        traffic = Traffic(client, queue)
        worker = group.create_task(traffic.answer())
        yield traffic
        worker.cancel()


@pytest.mark.parametrize(
    ("binary", "accident"),
    [(valkey_binary(), "killed"), (redis_binary(), "demoted")],
    ids=["killed", "demoted"],
)
async def test_work_goes_on_by_itself_after_a_failover(binary: str, accident: str) -> None:
    """redis-py#460, #435: clients of a demoted primary were told READONLY without end."""
    with running_sentinel_set(binary) as servers:
        first = servers.primary
        async with traffic_on(servers) as traffic, asyncio.timeout(60):
            ids = [JobId(f"job-{number}") for number in range(120)]
            async with asyncio.TaskGroup() as group:
                for number, job_id in enumerate(ids):
                    if number == len(ids) // 2:
                        await asyncio.to_thread(first.kill if accident == "killed" else servers.fail_over)
                    group.create_task(traffic.ask(job_id))
                    await asyncio.sleep(PAUSE)
            await asyncio.to_thread(await_that, lambda: servers.primary is not first)
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(traffic.ask(JobId(f"afterwards-{number}")))

        assert {result.text for result in traffic.results.values()} == set(traffic.results)
        assert len(traffic.results) == 140
        with servers.primary.client() as redis:
            recorded = Counter(fields[b"id"] for _, fields in redis.xrange("tidemill:{q}:results:answers"))
        assert set(recorded.values()) == {1}
        assert {f"afterwards-{number}".encode() for number in range(20)} <= set(recorded)


async def test_a_sentinel_may_have_a_password_of_its_own_or_the_servers() -> None:
    binary = valkey_binary()
    with running(binary, "--requirepass", "p@ss") as server:
        of_server = f"sentinel auth-pass {SERVICE} p@ss"
        with running_sentinel(binary, server, of_server, "requirepass other") as sentinel:
            url = f"redis+sentinel://:p%40ss@127.0.0.1:{sentinel.port}/{SERVICE}/2"
            async with connect(f"{url}?sentinel_password=other") as redis:
                assert await redis.ping()
                assert (await redis.client_info())["db"] == 2
            async with connect(url) as redis, Client(url, queue="q") as client:
                assert address_of(redis) == f"{SERVICE} (sentinels 127.0.0.1:{sentinel.port})"
                with pytest.raises(QueueUnavailable, match=f"no primary.*{sentinel.port}: .*password"):
                    await client.ping()
        for own in ("requirepass p@ss", ""):
            with running_sentinel(binary, server, of_server, own) as sentinel:
                url = f"redis+sentinel://:p%40ss@127.0.0.1:{sentinel.port}/{SERVICE}"
                async with connect(url) as redis:
                    assert await redis.ping()


async def test_a_server_that_is_no_primary_is_not_used() -> None:
    """A sentinel that was cut off names yesterday's primary."""
    with running(valkey_binary(), "--replicaof", "127.0.0.1", str(free_port())) as replica:
        async with sentinel_that_names(replica) as url, Client(url, queue="q") as client:
            with pytest.raises(QueueUnavailable, match=f"no primary.*:{replica.port} was named, and is none"):
                await client.depth()


@asynccontextmanager
async def sentinel_that_names(server: Server) -> AsyncIterator[str]:
    """Something that gives every question the same answer; yields its URL."""
    port = str(server.port)
    reply = f"*2\r\n$9\r\n127.0.0.1\r\n${len(port)}\r\n{port}\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            # What a client says of itself is refused, which redis-py does not mind.
            writer.write(reply if b"get-master" in data else b"-ERR no\r\n" * data.count(b"*"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as sentinel:
        yield f"redis+sentinel://127.0.0.1:{sentinel.sockets[0].getsockname()[1]}/{SERVICE}"


async def test_a_service_that_no_sentinel_knows_is_named() -> None:
    with running(valkey_binary()) as server, running_sentinel(valkey_binary(), server) as sentinel:
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/elsewhere"
        with pytest.raises(QueueUnavailable, match="no service of the name elsewhere"):
            await queue_names(url)
        async with Client(url.replace("elsewhere", SERVICE), queue="q") as client:
            await client.submit(make_job("a"))
        assert await queue_names(url.replace("elsewhere", SERVICE)) == ["q"]
