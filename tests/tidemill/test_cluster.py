"""A cluster: every queue lives on one node, which is found, and found again when it is another one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from tests.tidemill.echo_worker import open_queue, work
from tests.tidemill.factories import make_job
from tests.tidemill.server_sets import (
    PRIMARIES,
    Cluster,
    await_that,
    link_is_up,
    running_cluster_of_three,
)
from tests.tidemill.traffic import assert_outlives, assert_recorded_once
from tidemill.client import Client
from tidemill.connection import address_of, connect
from tidemill.discovery import queue_names
from tidemill.errors import QueueUnavailable
from tidemill.jobs import JobId
from tidemill.queue import Queue

PAUSE = 0.02


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster_of_three() as made:
        yield made


def queues_on(node: int, label: str) -> Iterator[str]:
    """Names of queues that live on a node."""
    names = (f"{label}-{number}" for number in itertools.count())
    return (name for name in names if Cluster.owner(name) == node)


def keys_of(cluster: Cluster, node: int, queue: str) -> list[bytes]:
    """What a node holds of a queue."""
    return [key for key in cluster.ask(node, "KEYS", "*") if f"{{{queue}}}".encode() in key]


async def answered(client: Client, queue: Queue, job_id: str) -> str | None:
    """Put one job through its life."""
    await client.submit(make_job(job_id, prompt=job_id, stream=True))
    await work(queue)
    result = await client.result(JobId(job_id), timeout=10)
    assert "".join([delta.text async for delta in client.stream(JobId(job_id))]) == result.text
    return result.text


async def patiently(client: Client, queue: Queue, job_id: str) -> list[str]:
    """The same by those who go on trying; what they were told meanwhile."""
    refusals: list[str] = []
    async with asyncio.timeout(20):
        while True:
            try:
                assert await answered(client, queue, job_id) == job_id
                return refusals
            except QueueUnavailable as refusal:
                refusals.append(str(refusal))
                await asyncio.sleep(PAUSE)


async def test_queues_live_on_all_nodes_and_are_found_there(cluster: Cluster) -> None:
    names = [next(queues_on(node, "life")) for node in range(PRIMARIES)]
    for name in names:
        async with Client(cluster.url, queue=name) as client, open_queue(cluster.url, name) as queue:
            assert await answered(client, queue, "a") == "a"
            await client.submit(make_job("b"))
            assert await client.cancel(JobId("b")) == "cancelled"
            assert (await client.depth()).total == 0
            await client.submit(make_job("c"))

    assert set(names) <= set(await queue_names(cluster.url))
    for node, name in enumerate(names):
        assert [other for other in range(PRIMARIES) if keys_of(cluster, other, name)] == [node]


async def test_a_queue_that_has_moved_is_followed(cluster: Cluster) -> None:
    """Moving it by hand, key by key, halts it: no script may run where half of the keys are."""
    name = next(queues_on(1, "moved"))
    async with Client(cluster.url, queue=name) as client, open_queue(cluster.url, name) as queue:
        assert await answered(client, queue, "before") == "before"
        await client.submit(make_job("waiting", prompt="waiting"))
        blocked = asyncio.create_task(queue.wait(2))
        for _ in cluster.move(name, 2):
            for side in (client, queue):
                with pytest.raises(QueueUnavailable, match="is handing this queue over"):
                    await (side.submit(make_job("x")) if side is client else work(queue))
        await asyncio.wait([blocked])

        refusals = await patiently(client, queue, "after")

        assert all("another node of the cluster does" in refusal for refusal in refusals)
        assert len(refusals) <= 2, "one for each side"
        assert (await client.result(JobId("waiting"), timeout=10)).text == "waiting"
        assert isinstance(blocked.exception(), QueueUnavailable | None)
        await client.submit(make_job("last"))
    assert keys_of(cluster, 1, name) == []
    assert name in await queue_names(cluster.url)


async def test_work_goes_on_after_a_failover_and_nothing_is_lost(cluster: Cluster) -> None:
    """One that waits for the replica, as an operator asks for it before a restart."""
    name = next(queues_on(0, "failover"))
    ids = [f"job-{number}" for number in range(60)]
    async with (
        Client(cluster.url, queue=name, results="answers") as client,
        open_queue(cluster.url, name) as queue,
    ):
        for job_id in ids[:30]:
            await client.submit(make_job(job_id, prompt=job_id))
        cluster.ask(PRIMARIES, "CLUSTER", "FAILOVER")
        await asyncio.to_thread(await_that, lambda: cluster.is_primary(PRIMARIES))
        refusals = [await patiently(client, queue, job_id) for job_id in ids[30:]]
        results = [result.id async for result in client.as_completed(map(JobId, ids), timeout=20)]
        recorded = [result.id for _, result in await queue.results("answers", count=1000)]
    assert sum(map(len, refusals)) <= 4, "a few, not one for each"
    assert sorted(results) == sorted(recorded) == sorted(ids)
    assert cluster.ask(PRIMARIES, "DBSIZE") > 0


async def test_work_goes_on_by_itself_after_a_primary_is_killed(cluster: Cluster) -> None:
    """Its replica is elected by the others, who refuse meanwhile, since a part of the slots is not served."""
    name = next(queues_on(0, "killed"))
    pair = (0, PRIMARIES)  # either is the primary, by what was done before
    first, second = pair if cluster.is_primary(0) else pair[::-1]
    await assert_outlives(
        cluster.url, cluster.nodes[first].kill, lambda: cluster.is_primary(second), queue=name
    )
    assert_recorded_once(cluster.nodes[second], name)

    cluster.nodes[first].start()
    await asyncio.to_thread(await_that, lambda: link_is_up(cluster.nodes[first]))
    assert keys_of(cluster, second, name)


async def test_an_ordinary_url_of_a_node_says_what_to_use(cluster: Cluster) -> None:
    name = next(queues_on(1, "elsewhere"))
    async with Client(cluster.nodes[2].url, queue=name) as client:
        with pytest.raises(QueueUnavailable, match=r"does not hold this queue.*redis\+cluster://"):
            await client.submit(make_job("a"))


async def test_a_cluster_that_is_away_is_named_by_its_seeds() -> None:
    url = "redis+cluster://user:hidden@127.0.0.1:1,127.0.0.1:2"
    async with connect(url, queue="q") as redis:
        assert address_of(redis) == "cluster 127.0.0.1:1, 127.0.0.1:2"
    async with Client(url, queue="q") as client:
        with pytest.raises(QueueUnavailable, match=r"no primary that could be found: .*:[12]: Error"):
            await client.ping()
    with pytest.raises(QueueUnavailable, match="no primary that could be found"):
        await queue_names(url)
