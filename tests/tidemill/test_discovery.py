"""Which queues a server holds."""

from __future__ import annotations

from tests.tidemill.echo_worker import open_queue, work
from tests.tidemill.factories import make_job
from tests.tidemill.servers import running, valkey_binary
from tidemill.card import ModelCard
from tidemill.client import Client
from tidemill.discovery import queue_names

CARD = ModelCard(model="m", max_model_len=10, max_total_tokens=20)


async def test_queues_with_jobs_or_workers_are_found_and_nothing_else() -> None:
    with running(valkey_binary()) as server:
        with server.client() as redis:
            redis.set("tidemill:{not a queue}:load", "x")
            redis.set("other:load", "x")
        assert await queue_names(server.url) == []
        for name in ("org/model:v1", "busy"):
            async with Client(server.url, queue=name) as client:
                await client.submit(make_job("a"))
        async with open_queue(server.url, "served") as queue:
            await queue.publish_card(CARD)
        assert await queue_names(server.url) == ["busy", "org/model:v1", "served"]


async def test_a_queue_that_was_emptied_may_be_gone() -> None:
    with running(valkey_binary()) as server, server.client() as redis:
        async with Client(server.url, queue="done") as client:
            await client.submit(make_job("a"))
        async with open_queue(server.url, "done") as queue:
            await work(queue)
        assert redis.dbsize() > 0
        assert await queue_names(server.url) in ([], ["done"])
