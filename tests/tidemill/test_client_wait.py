"""Results: one answer for whoever asks, however the job ended and whoever submitted it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.tidemill.echo_worker import FAIL, finish, work
from tests.tidemill.factories import make_job
from tests.tidemill.servers import Server
from tidemill.client import Client, ClientSettings
from tidemill.errors import JobFailed, JobUnknown, QueueUnavailable
from tidemill.jobs import JobId, Status
from tidemill.queue import Queue


async def begun(*tasks: asyncio.Task[object]) -> None:
    """Let tasks get as far as waiting."""
    await asyncio.wait(tasks, timeout=0.05)


async def test_a_result_comes_to_those_who_wait(client: Client, worker_side: Queue) -> None:
    job_id = await client.submit(make_job("a", prompt="echo", metadata={"page": "7"}))
    waiting = asyncio.create_task(client.result(job_id, timeout=5))
    await begun(waiting)
    await work(worker_side)
    result = await waiting
    assert (result.text, result.metadata, result.attempts) == ("echo", {"page": "7"}, 1)


async def test_a_result_can_be_had_again_and_without_waiting(client: Client, worker_side: Queue) -> None:
    job_id = await client.submit(make_job("a", prompt="echo"))
    await work(worker_side)
    assert await client.result(job_id, timeout=0) == await client.result(job_id)


async def test_a_failed_job_is_an_answer_and_raises_on_request(client: Client, worker_side: Queue) -> None:
    job_id = await client.submit(make_job("a", prompt=FAIL))
    await work(worker_side)
    result = await client.result(job_id, timeout=5)
    assert result.status is Status.FAILED
    with pytest.raises(JobFailed, match="job a: asked to fail"):
        result.raise_for_status()


async def test_an_unknown_job_is_told_at_once(client: Client) -> None:
    with pytest.raises(JobUnknown, match="ghost"):
        await client.result(JobId("ghost"))


async def test_a_deadline_is_kept_though_nobody_serves_the_queue(client: Client) -> None:
    job_id = await client.submit(make_job("a", deadline=0.01))
    result = await client.result(job_id, timeout=5)
    assert result.status is Status.EXPIRED


@pytest.mark.parametrize("timeout", [0, 0.05])
async def test_no_answer_in_time_is_a_timeout(client: Client, timeout: float) -> None:
    job_id = await client.submit(make_job("a"))
    with pytest.raises(TimeoutError, match="job a has no result after"):
        await client.result(job_id, timeout=timeout)


async def test_another_clients_job_can_be_waited_for(
    client: Client, worker_side: Queue, valkey: Server, queue_name: str
) -> None:
    """Given a job submitted by another process, its answer on another stream is found all the same."""
    job_id = await client.submit(make_job("a", prompt="echo"))
    async with Client(valkey.url, queue=queue_name) as stranger:
        waiting = asyncio.create_task(stranger.result(job_id, timeout=5))
        await begun(waiting)
        await work(worker_side)
        assert (await waiting).text == "echo"


async def test_a_shared_stream_gives_each_client_its_own(
    worker_side: Queue, valkey: Server, queue_name: str
) -> None:
    """B#644: with two readers of one list, the wrong one takes a result and discards it."""
    async with (
        Client(valkey.url, queue=queue_name, results="shared") as one,
        Client(valkey.url, queue=queue_name, results="shared") as two,
    ):
        for number in range(20):
            await (one, two)[number % 2].submit(make_job(f"job-{number}", prompt=f"text {number}"))
        waiting = [
            asyncio.create_task((one, two)[number % 2].result(JobId(f"job-{number}"), timeout=5))
            for number in range(20)
        ]
        await begun(*waiting)
        await work(worker_side)
        assert [(await task).text for task in waiting] == [f"text {number}" for number in range(20)]


async def test_a_job_lost_with_its_data_is_unknown_to_those_who_wait(
    client: Client, worker_side: Queue, valkey: Server
) -> None:
    job_id = await client.submit(make_job("a"))
    waiting = asyncio.create_task(client.result(job_id, timeout=5))
    await begun(waiting)
    with valkey.client() as redis:
        redis.delete(worker_side.keys.job(job_id))
    with pytest.raises(JobUnknown):
        await waiting


async def test_a_wait_given_up_leaves_the_others_waiting(client: Client, worker_side: Queue) -> None:
    job_id = await client.submit(make_job("a", prompt="echo"))
    given_up = asyncio.create_task(client.result(job_id, timeout=5))
    waiting = asyncio.create_task(client.result(job_id, timeout=5))
    await begun(given_up, waiting)
    given_up.cancel()
    await work(worker_side)
    assert (await waiting).text == "echo"
    assert given_up.cancelled()


async def test_closing_tells_those_who_wait(valkey: Server, queue_name: str) -> None:
    async with Client(valkey.url, queue=queue_name) as client:
        waiting = asyncio.create_task(client.result(await client.submit(make_job("a"))))
        await begun(waiting)
    with pytest.raises(QueueUnavailable, match="closed"):
        await waiting


async def test_many_waits_do_not_starve_other_calls(
    worker_side: Queue, valkey: Server, queue_name: str
) -> None:
    """redis-py#2517: readers that block must not hold the connections that commands need."""
    settings = ClientSettings(max_connections=1)
    async with Client(valkey.url, queue=queue_name, settings=settings) as client:
        names = [f"job-{number}" for number in range(30)]
        await client.submit_batch([make_job(name, prompt="echo") for name in names])
        waits = [asyncio.create_task(client.result(JobId(name), timeout=10)) for name in names]
        streams = [asyncio.create_task(anext(client.stream(JobId(name)))) for name in names]
        await begun(*waits, *streams)
        async with asyncio.timeout(2):
            assert (await client.depth()).total == 30
        await work(worker_side)
        assert {result.text for result in await asyncio.gather(*waits)} == {"echo"}
        assert {delta.text for delta in await asyncio.gather(*streams)} == {"echo"}


async def test_cancelled_calls_leave_no_reply_behind(client: Client) -> None:
    """redis-py#2624: after a call was cancelled, the next one must not read its reply."""
    names = [JobId(f"job-{number}") for number in range(40)]
    await client.submit_batch([make_job(name, tenant=name) for name in names])
    for turns in range(40):
        doomed = [asyncio.create_task(client.status(name)) for name in names]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        views = await asyncio.gather(*(client.status(name) for name in names[:5]))
        assert [view.tenant for view in views] == names[:5]


async def test_mixed_outcomes_come_as_they_are_decided(client: Client, worker_side: Queue) -> None:
    await client.submit_batch(
        [make_job("good", prompt="echo"), make_job("bad", prompt=FAIL), make_job("unwanted")]
    )
    await client.cancel(JobId("unwanted"))
    seen = {}
    with pytest.raises(JobUnknown, match="ghost"):
        async for result in client.as_completed(
            [JobId(name) for name in ("ghost", "good", "bad", "unwanted")], timeout=5
        ):
            seen[result.id] = result.status
            if result.id == "unwanted":
                await work(worker_side)
    assert seen == {"unwanted": Status.CANCELLED, "good": Status.SUCCEEDED, "bad": Status.FAILED}
    assert next(iter(seen)) == "unwanted"


async def test_submission_and_answers_overlap_within_a_window(
    worker_side: Queue, valkey: Server, queue_name: str
) -> None:
    """Given more jobs than the window, when both ends run at once, then the queue stays shallow."""
    settings = ClientSettings(window=20)
    deepest = 0
    async with Client(valkey.url, queue=queue_name, settings=settings) as client:
        jobs = (make_job(f"job-{number}", prompt=f"text {number}") for number in range(200))
        seen = []
        async for result in _served(client, worker_side, client.submit_many(jobs, batch=10)):
            seen.append(result)
            deepest = max(deepest, (await client.depth()).total)
    assert sorted(seen) == sorted(f"text {number}" for number in range(200))
    assert deepest <= 40


async def _served(client: Client, queue: Queue, ids: AsyncIterator[JobId]) -> AsyncIterator[str]:
    async def serve() -> None:
        while True:
            for claimed in await queue.claim("echo", 7):
                await finish(queue, claimed)
            await queue.wait(0.05)

    worker = asyncio.create_task(serve())
    try:
        async for result in client.as_completed(ids, timeout=20):
            yield result.text
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


async def test_an_earlier_processes_jobs_can_be_collected(
    worker_side: Queue, valkey: Server, queue_name: str
) -> None:
    names = [JobId(f"job-{number}") for number in range(300)]
    async with Client(valkey.url, queue=queue_name) as gone:
        await gone.submit_batch([make_job(name) for name in names])
    async with Client(valkey.url, queue=queue_name) as client:
        collected = asyncio.create_task(_ids(client, names))
        await begun(collected)
        while await work(worker_side):
            pass
        assert sorted(await collected) == sorted(names)


async def _ids(client: Client, names: list[JobId]) -> list[JobId]:
    return [result.id async for result in client.as_completed(names, timeout=10)]
