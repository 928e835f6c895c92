"""What a worker tells the queue of itself: who serves what, and how it does, for as long as it does."""

from __future__ import annotations

import asyncio

from tests.tidemill.servers import running, valkey_binary
from tests.worker.factories import FakeEngine, Place, eventually, make_job, opener, running_worker
from tidemill.client import Client
from tidemill.jobs import Status
from tidemill.registry import WorkerReport, WorkerState


async def reports(place: Place) -> list[WorkerReport]:
    async with opener(place)() as queue:
        return [view.report for view in await queue.workers()]


async def report_that_says(place: Place, state: WorkerState) -> WorkerReport:
    async with asyncio.timeout(10):
        while True:
            found = [report for report in await reports(place) if report.state is state]
            if found:
                return found[0]
            await asyncio.sleep(0.01)


async def test_a_worker_is_listed_from_its_start_to_its_end(place: Place, client: Client) -> None:
    """It tells of a change at once, though heartbeats are seconds apart."""
    jobs = [make_job(f"Mill {n}") for n in range(3)]
    engine = FakeEngine(paced=True)
    async with running_worker(place, engine=engine, capacity=5) as worker:
        report = await report_that_says(place, WorkerState.SERVING)
        assert (report.name, report.queue, report.capacity) == ("w1", place.queue, 5)
        for job in jobs:
            await client.submit(job)
        engine.allow(1)
        await eventually(lambda: len(engine.seen) == 3 and engine._steps == 1)
        worker.service.request_stop()
        report = await report_that_says(place, WorkerState.DRAINING)
        assert (report.held, report.unrecorded) == (3, 0)
        assert report.uptime > 0.0
        engine.free()
        assert await asyncio.wait_for(worker.task, 20) is True
    assert await reports(place) == []


async def test_a_worker_that_comes_back_from_an_outage_is_listed_again() -> None:
    """Also with a server that has forgotten everything: the card is for the next publication, the report
    for the next heartbeat."""
    with running(valkey_binary()) as server:
        place = Place(server.url, "forgetful")
        async with running_worker(place) as worker:
            await report_that_says(place, WorkerState.SERVING)
            await asyncio.to_thread(server.kill)
            worker.service._announcer.report_now()
            await asyncio.to_thread(server.start)
            await report_that_says(place, WorkerState.SERVING)


async def test_what_redis_will_not_hear_does_not_end_the_worker(client: Client, place: Place) -> None:
    """A foreign hand has put something in the card's place."""
    async with opener(place)() as queue:
        await queue._link.redis.set(queue.keys.card, "foreign")
        async with running_worker(place) as worker:
            await report_that_says(place, WorkerState.SERVING)
            job_id = await client.submit(make_job("Mill"))
            assert (await client.result(job_id, timeout=20)).status is Status.SUCCEEDED
            assert not worker.task.done()
