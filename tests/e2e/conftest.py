"""One server, one worker and one engine called directly, for all tests that do not break them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.e2e.oracle import Oracle
from tests.e2e.processes import Worker, worker_process
from tests.tidemill.servers import Server, running, valkey_binary
from tidemill.client import Client
from tidemill.connection import connect
from tidemill.queue import Queue

QUEUE = "smollm2"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running(valkey_binary(), "--appendonly", "yes", "--maxmemory-policy", "noeviction") as started:
        yield started


@pytest.fixture(scope="session")
def _started(
    server: Server, smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    """Loads its model while the tests are already preparing."""
    folder = tmp_path_factory.mktemp("worker")
    flags = {"kv_cache_memory": 0.1, "renewal": 0.5}
    with worker_process(smollm2_folder, server.url, QUEUE, folder, **flags) as worker:
        yield worker


@pytest.fixture
async def worker(_started: Worker) -> Worker:
    """Serves QUEUE. Its KV cache is much smaller than the model's context."""
    await _started.ready()
    return _started


@pytest.fixture(scope="session")
def oracle(smollm2_folder: Path) -> Oracle:
    return Oracle(smollm2_folder, QUEUE)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with Client(server.url, queue=QUEUE) as made:
        yield made


@pytest.fixture
async def queue(server: Server) -> AsyncIterator[Queue]:
    """The same queue as an operator reads it, and tests that write what nobody should."""
    redis = connect(server.url)
    made = Queue(redis, QUEUE)
    yield made
    await made.aclose()
    await redis.aclose()
