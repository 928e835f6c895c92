"""Servers of the session, and a queue of its own for every test, audited when the test is over."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest
from redis.asyncio import Redis

from tests.tidemill.audit import Audit
from tests.tidemill.echo_worker import open_queue
from tests.tidemill.factories import LEASE, make_settings
from tests.tidemill.servers import Server, redis_binary, running, running_cluster, valkey_binary
from tidemill.client import Client
from tidemill.connection import connect
from tidemill.queue import Queue


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, Server]]:
    """One server of each kind, old enough for reclaims under a lease of `LEASE`."""
    with ExitStack() as stack:
        started = {
            "valkey": stack.enter_context(running(valkey_binary())),
            "redis": stack.enter_context(running(redis_binary())),
            "cluster": stack.enter_context(running_cluster()),
        }
        for server in started.values():
            server.await_uptime(LEASE)
        yield started


@pytest.fixture(params=["valkey", "redis", "cluster"])
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    """Each kind of server in turn."""
    return servers[request.param]


@pytest.fixture
def valkey(servers: dict[str, Server]) -> Server:
    """The default server alone, for tests of our side of the wire."""
    return servers["valkey"]


@pytest.fixture
async def redis(server: Server) -> AsyncIterator[Redis]:
    client = connect(server.url)
    yield client
    await client.aclose()


@pytest.fixture
def queue_name() -> str:
    return f"test/{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def queue(server: Server, redis: Redis, queue_name: str) -> AsyncIterator[Queue]:
    """An empty queue; at the end of the test all its books must balance."""
    made = Queue(redis, queue_name, make_settings())
    yield made
    await made.aclose()
    with server.client() as client:
        assert Audit(client, made.keys.prefix).run() == []


@pytest.fixture
async def client(valkey: Server, queue_name: str) -> AsyncIterator[Client]:
    """A producer on the default server."""
    async with Client(valkey.url, queue=queue_name) as made:
        yield made


@pytest.fixture
async def worker_side(valkey: Server, queue_name: str) -> AsyncIterator[Queue]:
    """The other end of the client's queue."""
    async with open_queue(valkey.url, queue_name) as made:
        yield made
