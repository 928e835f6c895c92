"""What can be read of a queue: results, streamed text, depth, the model card."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tests.tidemill.factories import (
    OTHER,
    REPLY,
    WORKER,
    lapse,
    make_deltas,
    make_due,
    make_job,
    make_result,
    reclaim_after_lapse,
    renewal,
    sibling,
    submit,
    submit_and_claim,
    waiting,
)
from tidemill.card import ModelCard
from tidemill.errors import ErrorCode
from tidemill.jobs import Delta, JobId, Priority, Status
from tidemill.queue import Queue

A = JobId("a")


# results


async def test_results_are_read_from_a_cursor_on(queue: Queue) -> None:
    await submit(queue, *(make_job(name) for name in "abc"))
    for claimed in await queue.claim(WORKER, 3):
        await queue.finish(WORKER, claimed.attempt, make_result(claimed.job_id))

    first = await queue.results(REPLY, count=2)
    rest = await queue.results(REPLY, first[-1][0])

    assert [result.id for _, result in [*first, *rest]] == ["a", "b", "c"]
    assert await queue.results(REPLY, rest[-1][0]) == []


async def test_a_reader_is_woken_by_a_result(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)
    reader = asyncio.create_task(queue.results(REPLY, block=2))
    await asyncio.sleep(0.05)
    await queue.finish(WORKER, claimed.attempt, make_result("a"))

    ((_, result),) = await asyncio.wait_for(reader, 1)
    assert result == make_result("a")


async def test_blocking_readers_do_not_starve_commands(queue: Queue) -> None:
    """One pool for both stood still once every connection was held by a blocking read."""
    readers = [asyncio.create_task(queue.results(f"r{i}", block=0.5)) for i in range(40)]
    await asyncio.sleep(0.05)

    await asyncio.wait_for(submit(queue, make_job("a")), 0.4)
    await asyncio.gather(*readers)


async def test_acknowledged_results_are_gone(queue: Queue) -> None:
    claimed = await submit_and_claim(queue)
    await queue.finish(WORKER, claimed.attempt, make_result("a"))
    ((entry, _),) = await queue.results(REPLY)

    await queue.acknowledge(REPLY, [entry])
    await queue.acknowledge(REPLY, [])

    assert await queue.results(REPLY) == []
    assert await queue.result(A) is None


async def test_an_entry_that_is_no_result_does_not_stop_a_reader(queue: Queue, redis: Redis) -> None:
    await redis.xadd(queue.keys.results(REPLY), {"id": "x", "result": b"\xff"})
    await redis.xadd(queue.keys.results(REPLY), {"what": "ever"})
    await redis.expire(queue.keys.results(REPLY), 60)

    entries = await queue.results(REPLY)

    found = [result for _, result in entries]
    assert [result.status for result in found] == [Status.FAILED] * 2
    assert found[0].id == "x"
    assert found[0].error is not None
    assert found[0].error.code is ErrorCode.UNDECODABLE
    await queue.acknowledge(REPLY, [entry for entry, _ in entries])


async def test_results_older_than_their_time_are_trimmed(queue: Queue, redis: Redis) -> None:
    brief = sibling(queue, redis, result_ttl=0.15)
    await submit(brief, make_job("old"), make_job("new"))
    old, new = await brief.claim(WORKER, 2)
    await brief.finish(WORKER, old.attempt, make_result("old"))
    await asyncio.sleep(0.1)
    await redis.persist(queue.keys.results(REPLY))
    await asyncio.sleep(0.1)
    await brief.finish(WORKER, new.attempt, make_result("new"))

    assert [result.id for _, result in await brief.results(REPLY)] == ["new"]


async def test_everything_of_a_finished_job_expires(queue: Queue, redis: Redis) -> None:
    brief = sibling(queue, redis, result_ttl=0.1, stream_ttl=0.1, lease=0.1)
    claimed = await submit_and_claim(brief, stream=True)
    await brief.renew(WORKER, [renewal(claimed, 2)])
    await brief.finish(WORKER, claimed.attempt, make_result("a"))
    await asyncio.sleep(0.2)

    assert await redis.keys(f"{queue.keys.prefix}*") == []


# streamed text


async def test_streamed_text_is_read_as_it_comes_and_ends_with_the_result(queue: Queue) -> None:
    claimed = await submit_and_claim(queue, stream=True)
    assert claimed.stream
    await queue.renew(WORKER, [renewal(claimed, 2, 1)])
    first = await queue.deltas(A)
    assert (first.deltas, first.ended) == (make_deltas(2, 1), False)

    reader = asyncio.create_task(queue.deltas(A, first.cursor, block=2))
    await asyncio.sleep(0.05)
    await queue.renew(WORKER, [renewal(claimed, 1, start=3)])
    second = await asyncio.wait_for(reader, 1)
    assert (second.deltas, second.ended) == (make_deltas(1, start=3), False)

    reader = asyncio.create_task(queue.deltas(A, second.cursor, block=2))
    await asyncio.sleep(0.05)
    await queue.finish(WORKER, claimed.attempt, make_result("a", "0 1 2 3 4"))
    last = await asyncio.wait_for(reader, 1)
    assert (last.deltas, last.ended) == ((), True)


async def test_a_stream_goes_on_over_a_reclaim_without_gap_or_repeat(queue: Queue, redis: Redis) -> None:
    """sglang#39645: two generations were spliced together and called a success."""
    claimed = await submit_and_claim(queue, stream=True)
    await queue.renew(WORKER, [renewal(claimed, 3)])
    page = await queue.deltas(A)
    (heir,) = await reclaim_after_lapse(redis, queue, "a")
    await queue.renew(WORKER, [renewal(claimed, 3, 4)])
    await queue.renew(OTHER, [renewal(heir, 1, start=3)])

    rest = await queue.deltas(A, page.cursor)

    assert (*page.deltas, *rest.deltas) == make_deltas(3, 1)


async def test_pages_of_deltas_can_be_small(queue: Queue) -> None:
    claimed = await submit_and_claim(queue, stream=True)
    await queue.renew(WORKER, [renewal(claimed, 1, 1, 1)])
    cursor, found = "0", list[Delta]()
    while (page := await queue.deltas(A, cursor, count=1)).deltas:
        cursor = page.cursor
        found += page.deltas

    assert tuple(found) == make_deltas(1, 1, 1)


async def test_there_are_no_deltas_of_a_job_that_is_unknown_or_not_begun(queue: Queue) -> None:
    await submit(queue, make_job("a", stream=True))

    for job_id in (A, JobId("ghost")):
        page = await queue.deltas(job_id)
        assert (page.deltas, page.cursor, page.ended) == ((), "0", False)


# depth


async def test_the_depth_of_an_empty_queue_is_nothing(queue: Queue) -> None:
    depth = await queue.depth()

    assert (depth.total, depth.running, depth.delayed, depth.dead_letters) == (0, 0, 0, 0)
    assert depth.oldest_waiting is None


async def test_depth_counts_by_priority_and_tenant(queue: Queue, redis: Redis) -> None:
    await submit(queue, *(make_job(f"n{i}", tenant="t") for i in range(3)), make_job("low", priority="low"))
    await submit(sibling(queue, redis, wire_version=2), make_job("v2", tenant="t"))
    await queue.claim(WORKER, 1)

    depth = await queue.depth()

    assert (depth.total, depth.running) == (4, 1)
    counts = (waiting(depth.by_tenant, tenant="t"), waiting(depth.by_tenant, Priority.LOW))
    assert sum(counts) == 4
    assert counts[1] in (0, 1)


async def test_depth_is_exact_in_every_state_at_once(queue: Queue, redis: Redis) -> None:
    """Lag is NULL here, and XLEN less pending counts orphans as running."""
    await submit(queue, *(make_job(name) for name in ("delayed", "lapsed", "released", "running", "done")))
    held = {job.job_id: job for job in await queue.claim(WORKER, 5)}
    await reclaim_after_lapse(redis, queue, "delayed")
    await reclaim_after_lapse(redis, queue, "delayed")
    await queue.release(WORKER, [renewal(held[JobId("released")])])
    await queue.finish(WORKER, 1, make_result("done"))
    await lapse(redis, queue, "lapsed")
    await submit(queue, make_job("waiting"))

    depth = await queue.depth()

    assert (depth.total, depth.waiting, depth.running, depth.delayed) == (4, 3, 1, 1)
    assert waiting(depth.by_tenant) == 3


async def test_the_oldest_waiting_job_is_the_one_submitted_first(queue: Queue) -> None:
    await submit(queue, make_job("a"))
    await asyncio.sleep(0.1)
    await submit(queue, make_job("b", priority="high"))
    depth = await queue.depth()
    assert depth.oldest_waiting == pytest.approx(0.1, abs=0.09)

    (newer,) = await queue.claim(WORKER, 1)
    assert newer.job_id == "b"
    (older,) = await queue.claim(WORKER, 1)
    assert (await queue.depth()).oldest_waiting is None
    await queue.release(WORKER, [renewal(older)])
    again = (await queue.depth()).oldest_waiting
    assert again is not None
    assert again >= 0.1


async def test_dead_letters_are_counted(queue: Queue, redis: Redis) -> None:
    queue = sibling(queue, redis, max_attempts=1)
    await submit_and_claim(queue)
    await reclaim_after_lapse(redis, queue, "a")

    assert (await queue.depth()).dead_letters == 1


async def test_standard_tools_see_what_is_pending(queue: Queue, redis: Redis) -> None:
    await submit(queue, make_job("a"), make_job("b"), make_job("c"))
    await queue.claim(WORKER, 1)
    await queue.claim(OTHER, 1)
    stream = queue.keys.jobs(1, Priority.NORMAL, "default")

    assert await redis.xlen(stream) == 3
    pending = await redis.xpending(stream, "workers")
    assert {consumer["name"].decode() for consumer in pending["consumers"]} == {WORKER, OTHER}


# the model card

CARD = ModelCard(
    model="m",
    max_model_len=2048,
    max_total_tokens=65536,
    chat_template_overhead=12,
    fingerprint="f",
    tokenizer_zlib=ModelCard.compress(b'{"model": {}}'),
)


async def test_a_published_card_is_read_back_whole(queue: Queue) -> None:
    assert await queue.model_card() is None
    await queue.publish_card(CARD)

    card = await queue.model_card()

    assert card == CARD
    assert card.tokenizer_json == b'{"model": {}}'


async def test_a_card_without_tokenizer_has_none(queue: Queue) -> None:
    await queue.publish_card(CARD.model_copy(update={"tokenizer_zlib": b""}))

    card = await queue.model_card()
    assert card is not None
    assert card.tokenizer_json is None


async def test_a_card_that_is_not_published_again_goes(queue: Queue, redis: Redis) -> None:
    brief = sibling(queue, redis, card_ttl=0.2)
    await brief.publish_card(CARD)
    await asyncio.sleep(0.12)
    await brief.publish_card(CARD)
    await asyncio.sleep(0.12)
    assert await queue.model_card() == CARD
    await asyncio.sleep(0.12)
    assert await queue.model_card() is None


async def test_a_new_card_replaces_the_old_one(queue: Queue) -> None:
    await queue.publish_card(CARD)
    newer = CARD.model_copy(update={"fingerprint": "g", "tokenizer_zlib": ModelCard.compress(b"{}")})
    await queue.publish_card(newer)

    assert await queue.model_card() == newer


async def test_a_retry_in_backoff_is_not_waiting_until_it_is_due(queue: Queue, redis: Redis) -> None:
    await submit_and_claim(queue)
    await reclaim_after_lapse(redis, queue, "a")
    await reclaim_after_lapse(redis, queue, "a")
    before = await queue.depth()
    await make_due(redis, queue, "a")
    await queue.claim(WORKER, 1)

    assert (before.waiting, before.delayed) == (0, 1)
    assert (await queue.depth()).running == 1
