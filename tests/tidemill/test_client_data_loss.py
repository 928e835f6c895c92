"""A server that loses its data: whoever waits for a job learns that it is unknown, soon and without haste."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from tests.tidemill.echo_worker import deltas, finish, open_queue, work
from tests.tidemill.factories import make_job
from tests.tidemill.servers import Server, running, valkey_binary
from tidemill.client import Client
from tidemill.errors import JobUnknown
from tidemill.jobs import JobId
from tidemill.moves import Renewal

SOON = 20.0
"""Seconds; a guard against waiting for ever."""

Wait = Callable[[Client], Awaitable[object]]
Loss = Callable[[Server], None]


@pytest.fixture
def server() -> Iterator[Server]:
    with running(valkey_binary()) as started:
        yield started


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with Client(server.url, queue="q") as made:
        yield made


async def read_all(client: Client) -> list[str]:
    return [delta.text async for delta in client.stream(JobId("a"))]


async def collect(client: Client) -> list[str]:
    return [result.id async for result in client.as_completed([JobId("a"), JobId("b")])]


WAITS: dict[str, Wait] = {
    "result": lambda client: client.result(JobId("a")),
    "as_completed": collect,
    "stream": read_all,
}


def flush(server: Server) -> None:
    with server.client() as redis:
        redis.flushall()


def restart(server: Server) -> None:
    server.kill()
    server.start()


LOSSES: dict[str, Loss] = {"flushed": flush, "restarted": restart}
"""A failover to a replica that had not received the job is, to a client, the second."""


async def begun(client: Client, wait: Wait) -> asyncio.Future[object]:
    """Somebody who waits for a job that nobody has claimed."""
    await client.submit_batch([make_job(name, prompt="whole", stream=True) for name in "ab"])
    waiting = asyncio.ensure_future(wait(client))
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    return waiting


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
async def test_those_who_wait_learn_that_the_job_is_unknown(
    client: Client, server: Server, wait: Wait, loss: Loss
) -> None:
    waiting = await begun(client, wait)
    await asyncio.to_thread(loss, server)
    with pytest.raises(JobUnknown, match="job a is unknown in queue q"):
        async with asyncio.timeout(SOON):
            await waiting


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
async def test_a_stream_in_progress_ends_too(client: Client, server: Server, loss: Loss) -> None:
    await client.submit(make_job("a", prompt="whole", stream=True))
    async with open_queue(server.url, "q") as queue:
        (claimed,) = await queue.claim("one", 1)
        await queue.renew("one", [Renewal(claimed.job_id, claimed.attempt, deltas("who"))])
    told = []
    with pytest.raises(JobUnknown, match="job a is unknown"):
        async with asyncio.timeout(SOON):
            async for delta in client.stream(JobId("a")):
                told.append(delta.text)
                if len(told) == 3:
                    await asyncio.to_thread(loss, server)
    assert told == ["w", "h", "o"]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
async def test_many_who_wait_all_learn_it_and_answers_from_before_are_kept(
    client: Client, server: Server, loss: Loss
) -> None:
    """Given 100 of 500 jobs answered, when the data is lost, then the other 400 are told at one go."""
    names = [JobId(f"job-{number:03}") for number in range(500)]
    await client.submit_batch([make_job(name, prompt=name) for name in names])
    async with open_queue(server.url, "q") as queue:
        await work(queue)
    answered = []
    with pytest.raises(JobUnknown, match=r"job job-\d+ is unknown in queue q.*; and 395 others"):
        async with asyncio.timeout(SOON):
            async for result in client.as_completed(names):
                answered.append(result.id)
                if len(answered) == 100:
                    await asyncio.to_thread(loss, server)
    assert sorted(answered) == names[:100]


async def test_a_job_submitted_again_after_the_loss_is_answered(client: Client, server: Server) -> None:
    waiting = await begun(client, WAITS["result"])
    await asyncio.to_thread(flush, server)
    with pytest.raises(JobUnknown):
        await waiting
    await client.submit(make_job("a", prompt="whole"))
    async with open_queue(server.url, "q") as queue:
        await work(queue)
    assert (await client.result(JobId("a"), timeout=SOON)).text == "whole"


async def test_a_stream_outlasts_a_restart_that_keeps_the_data() -> None:
    with running(valkey_binary(), "--appendonly", "yes", "--appendfsync", "always") as server:
        async with Client(server.url, queue="q") as client, open_queue(server.url, "q") as queue:
            await client.submit(make_job("a", prompt="whole", stream=True))
            (claimed,) = await queue.claim("one", 1)
            await queue.renew("one", [Renewal(claimed.job_id, claimed.attempt, deltas("who"))])
            told = []
            async with asyncio.timeout(SOON):
                async for delta in client.stream(JobId("a")):
                    told.append(delta.text)
                    if len(told) == 2:
                        await asyncio.to_thread(restart, server)
                        await finish(queue, claimed, "one")
    assert "".join(told) == "whole"
