"""The registry: who serves a queue, by reports that expire."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    REPLY,
    WORKER,
    make_job,
    make_report,
    make_result,
    sibling,
    submit_and_claim,
)
from tidemill.errors import InvalidJob
from tidemill.queue import Queue
from tidemill.registry import WorkerReport, WorkerState


async def listed(queue: Queue) -> list[str]:
    return [view.report.name for view in await queue.workers()]


async def test_a_worker_is_listed_as_it_reported_last(queue: Queue) -> None:
    await queue.report(make_report(running=3))
    last = make_report(running=4, state=WorkerState.DRAINING)
    await queue.report(last)

    (view,) = await queue.workers()

    assert view.report == last
    assert 0 <= view.age < 5


async def test_workers_are_listed_by_name(queue: Queue) -> None:
    for name in ("w2", "w10", "w1"):
        await queue.report(make_report(name))

    assert await listed(queue) == ["w1", "w10", "w2"]


async def test_a_queue_without_workers_lists_none(queue: Queue) -> None:
    assert await queue.workers() == []


async def test_the_age_is_told_by_the_servers_clock(queue: Queue, redis: Redis) -> None:
    await queue.report(make_report())
    await redis.zincrby(queue.keys.workers, -4000, WORKER)

    (view,) = await queue.workers()

    assert 4 <= view.age < 9


async def test_a_worker_that_is_silent_is_forgotten(queue: Queue, redis: Redis) -> None:
    brief = sibling(queue, redis, worker_ttl=0.05)
    await brief.report(make_report("gone"))
    await queue.report(make_report("here"))
    await asyncio.sleep(0.06)

    assert await listed(queue) == ["here"]
    await queue.report(make_report("here"))
    assert await redis.zrange(queue.keys.workers, 0, -1) == [b"here"]


async def test_the_registry_of_a_queue_that_everybody_left_goes(queue: Queue, redis: Redis) -> None:
    brief = sibling(queue, redis, worker_ttl=0.05)
    await brief.report(make_report())
    await asyncio.sleep(0.06)

    assert await redis.keys(f"{queue.keys.prefix}*") == []


async def test_a_worker_that_has_stopped_is_taken_off_the_list(queue: Queue, redis: Redis) -> None:
    await queue.report(make_report(WORKER))
    await queue.report(make_report(OTHER))

    assert await queue.remove_consumer(WORKER)

    assert await listed(queue) == [OTHER]
    assert await redis.exists(queue.keys.worker(WORKER)) == 0
    assert await redis.zrange(queue.keys.workers, 0, -1) == [OTHER.encode()]


async def test_a_worker_that_holds_jobs_stays_on_the_list(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)
    await queue.report(make_report())

    assert not await queue.remove_consumer(WORKER)
    assert await listed(queue) == [WORKER]

    await queue.finish(WORKER, claimed.attempt, make_result(claimed.job_id))
    assert await queue.remove_consumer(WORKER)
    assert await listed(queue) == []


async def test_what_is_no_report_is_no_worker(queue: Queue, redis: Redis) -> None:
    """A foreign hand in one report hides no other one."""
    for name in ("broken", "fine", "list"):
        await queue.report(make_report(name))
    await redis.set(queue.keys.worker("broken"), b"\xff{", ex=60)
    await redis.delete(queue.keys.worker("list"))
    await redis.lpush(queue.keys.worker("list"), "x")
    await redis.expire(queue.keys.worker("list"), 60)

    assert await listed(queue) == ["fine"]


async def test_a_worker_in_a_state_that_only_it_knows_is_listed(queue: Queue, redis: Redis) -> None:
    await queue.report(make_report())
    text = make_report(state=WorkerState.DRAINING).to_wire().replace("draining", "rebalancing")
    await redis.set(queue.keys.worker(WORKER), text, ex=60)

    (view,) = await queue.workers()

    assert view.report == make_report(state=WorkerState.UNKNOWN)


def test_a_report_of_a_newer_worker_can_be_read() -> None:
    text = make_report().to_wire().replace("{", '{"gpu_fans":3,', 1)

    assert WorkerReport.from_wire(text) == make_report()


@pytest.mark.parametrize(("field", "value"), [("kv_usage", 1.5), ("held", -1), ("heartbeat", 0)], ids=str)
def test_a_report_that_cannot_be_true_is_refused(field: str, value: object) -> None:
    text = make_report().model_copy(update={field: value}).model_dump_json(warnings=False)

    with pytest.raises(InvalidJob, match=field):
        WorkerReport.from_wire(text)


async def test_reports_are_no_jobs(queue: Queue) -> None:
    await queue.report(make_report())
    await queue.submit([make_job("a")], reply_to=REPLY)

    depth = await queue.depth()

    assert (depth.total, depth.running) == (1, 0)
