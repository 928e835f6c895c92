"""The access lists in the documentation: as small as can be, and enough for the whole life of a job."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from tests.tidemill.factories import (
    LEASE,
    make_job,
    make_report,
    make_result,
    make_settings,
    renewal,
    text_of,
)
from tests.tidemill.script_commands import commands_of
from tests.tidemill.server_sets import SERVICE, running_sentinel
from tests.tidemill.servers import Server, redis_binary, running, running_cluster, valkey_binary
from tidemill.card import ModelCard
from tidemill.client import Client, ClientSettings
from tidemill.connection import connect
from tidemill.discovery import queue_names
from tidemill.errors import JobUnknown, QueueUnavailable
from tidemill.jobs import JobId, Status
from tidemill.moves import FinishOutcome, JobState
from tidemill.queue import Queue
from tidemill.scripts import Move

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "connections.md"
PASSWORD = "of-the-test"
QUEUE = "org/model:v1"
OTHER = "org/model"
CARD = ModelCard(model="m", max_model_len=10, max_total_tokens=20)

MOVES = {
    "producer": {Move.SUBMIT, Move.CANCEL, Move.EXPIRE, Move.DEPTH},
    "monitor": {Move.DEPTH, Move.WORKERS},
    "worker": set(Move) - {Move.SUBMIT, Move.CANCEL, Move.EXPIRE, Move.DEPTH, Move.WORKERS},
}
ALL = {"ping", "evalsha", "script|load"}
DIRECT = {
    # In this order: where results begin; a job's state; its result; results and deltas; acknowledging them.
    "producer": ALL | {"time", "hmget", "xrange", "xread", "xdel"},
    # The model card and a job's state; dead letters; queues by name.
    "monitor": ALL | {"hmget", "xread", "xrange", "xrevrange", "scan"},
    # The doorbell; the model card.
    "worker": ALL | {"xread", "hget", "hset", "pexpire", "multi", "exec"},
}
SEEKER = "+sentinel|get-master-addr-by-name"
"""What a client asks a sentinel."""
OURS = {"config|resetstat", "acl|log", "client|setinfo", "auth"}
"""What the test itself asks for, and redis-py's introduction of itself."""

UNSEEN = {"worker": {"memory|usage", "zcard"}}
"""Needed on a server that holds more than it may, and where a tenant has nothing left but jobs in backoff."""


def documented() -> dict[str, list[str]]:
    """The rules of each user, in the order of the document."""
    lines = re.findall(r"^user tidemill-(\w+) (.+)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 4
    return {name: rules.split() for name, rules in lines}


def granted(user: str) -> set[str]:
    return {rule.removeprefix("+") for rule in documented()[user] if rule.startswith("+")}


def needed(user: str) -> set[str]:
    if user == "operator":
        return needed("producer") | needed("monitor") | {"xtrim"}
    return DIRECT[user].union(*map(commands_of, MOVES[user]))


@pytest.mark.parametrize("user", documented())
def test_a_user_may_run_what_its_scripts_and_calls_do_and_nothing_else(user: str) -> None:
    line = " ".join(f"+{command}" for command in sorted(needed(user)))
    assert granted(user) == needed(user), f"docs/connections.md should say: {line}"
    others = [rule for rule in documented()[user] if not rule.startswith("+")]
    assert others == ["on", ">PASSWORD", "~tidemill:{QUEUE}:*"]


@pytest.fixture(scope="module", params=[valkey_binary(), redis_binary()], ids=["valkey", "redis"])
def guarded(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with the document's users."""
    with running(request.param) as server:
        server.await_uptime(LEASE)
        with server.client() as admin:
            for user, rules in documented().items():
                named = [rule.replace("PASSWORD", PASSWORD).replace("QUEUE", QUEUE) for rule in rules]
                admin.execute_command("ACL", "SETUSER", f"tidemill-{user}", *named)
        yield server


def url_of(server: Server, user: str) -> str:
    return f"redis://tidemill-{user}:{PASSWORD}@127.0.0.1:{server.port}/0"


@asynccontextmanager
async def client_of(server: Server, user: str, queue: str = QUEUE) -> AsyncIterator[Client]:
    settings = ClientSettings(queue=make_settings(), patience=0.0)
    async with Client(url_of(server, user), queue=queue, settings=settings) as client:
        yield client


@asynccontextmanager
async def worker_of(server: Server, user: str = "worker") -> AsyncIterator[Queue]:
    async with connect(url_of(server, user)) as redis:
        queue = Queue(redis, QUEUE, make_settings(max_attempts=2, backoff=0.001))
        yield queue
        await queue.aclose()


class Watch:
    """What the server was asked for, by whom, and what it did not permit."""

    def __init__(self, admin: redis.Redis) -> None:
        self._admin = admin
        self.used: dict[str, set[str]] = {}

    @contextmanager
    def over(self, user: str) -> Iterator[None]:
        """Count what runs inside the block for this user, that in scripts too."""
        self._admin.config_resetstat()
        yield
        seen = {name.removeprefix("cmdstat_") for name in self._admin.info("commandstats")}
        self.used.setdefault(user, set()).update(seen - OURS)

    def refused(self) -> list[str]:
        return [str(entry["object"]) for entry in self._admin.acl_log() if entry["object"] not in OURS]


async def test_the_whole_life_of_a_job_with_these_users(guarded: Server) -> None:
    async with AsyncExitStack() as stack:
        admin = stack.enter_context(guarded.client())
        admin.acl_log_reset()
        watch = Watch(admin)
        producer = await stack.enter_async_context(client_of(guarded, "producer"))
        worker = await stack.enter_async_context(worker_of(guarded))
        with watch.over("producer"):
            await submit_some(producer)
        with watch.over("worker"):
            await work_on_some(worker)
        with watch.over("producer"):
            await read_and_cancel(producer)
        with watch.over("worker"):
            await end_the_rest(worker, admin)
        with watch.over("producer"):
            await read_results(guarded, producer)
        monitor = await stack.enter_async_context(client_of(guarded, "monitor"))
        with watch.over("monitor"):
            await look_at_all(guarded, monitor)
        operator = await stack.enter_async_context(client_of(guarded, "operator"))
        with watch.over("operator"):
            await bring_back(operator)
        with watch.over("worker"):
            assert await worker.remove_consumer("w1")

        assert watch.refused() == []
    for user, used in watch.used.items():
        assert used <= granted(user)
    for user in ("producer", "worker", "monitor"):
        assert granted(user) - watch.used[user] == UNSEEN.get(user, set()), "not needed by what is seen here"


async def submit_some(producer: Client) -> None:
    await producer.ping()
    ids = ("streamed", "cancelled-running", "released", "poison", "cancelled-waiting", "acknowledged")
    outcomes = await producer.submit_batch([make_job(name, stream=name == "streamed") for name in ids])
    assert outcomes == list(ids)
    assert (await producer.depth()).total == 6
    assert await producer.model_card() is None
    with pytest.raises(JobUnknown):
        await producer.status(JobId("nobody"))


async def work_on_some(worker: Queue) -> None:
    await worker.ping()
    await worker.publish_card(CARD)
    await worker.report(make_report("w1"))
    await worker.wait(0.01)
    claimed = await worker.claim("w1", 4)
    assert [job.job_id for job in claimed] == ["streamed", "cancelled-running", "released", "poison"]
    await worker.renew("w1", [renewal(claimed[0], 2), renewal(claimed[2], 1)])
    assert await worker.finish("w1", 1, make_result("streamed", text_of(0, 2))) is FinishOutcome.OK
    assert await worker.release("w1", [renewal(claimed[2], 1, start=1)]) == frozenset()


async def read_and_cancel(producer: Client) -> None:
    pieces = [delta.text async for delta in producer.stream(JobId("streamed"), timeout=5)]
    assert "".join(pieces) == (await producer.result(JobId("streamed"), timeout=5)).text
    assert await producer.cancel(JobId("cancelled-running")) == "requested"
    assert await producer.cancel(JobId("cancelled-waiting")) == "cancelled"
    late = await producer.submit(make_job("late", deadline=0.001))
    assert (await producer.result(late, timeout=5)).status is Status.EXPIRED


async def end_the_rest(worker: Queue, admin: redis.Redis) -> None:
    outcome = await worker.renew("w1", [])
    assert outcome.cancelled == {"cancelled-running"}
    await worker.finish("w1", 1, make_result("cancelled-running", status=Status.CANCELLED))
    for job in await worker.claim("w1", 2):
        assert await worker.finish("w1", job.attempt, make_result(job.job_id)) is FinishOutcome.OK
    admin.zadd(worker.keys.leases, {"poison": 1})
    (suspect,) = await worker.reclaim("w2", 1)
    assert suspect.alone
    assert await worker.begin("w2", suspect.job_id, suspect.attempt)
    admin.zadd(worker.keys.leases, {"poison": 1})
    assert await worker.reclaim("w1", 1) == []


async def read_results(server: Server, producer: Client) -> None:
    alone = await producer.submit(make_job("alone-in-its-lane", tenant="another"))
    assert await producer.cancel(alone) == "cancelled"
    await producer.submit(make_job("still-waiting"))
    ids = [JobId("poison"), JobId("acknowledged")]
    assert [result.id async for result in producer.as_completed(ids, timeout=5)] == ids
    async with connect(url_of(server, "producer")) as redis:
        reader = Queue(redis, QUEUE)
        entries = [entry for entry, result in await reader.results(producer.results) if result.id == ids[1]]
        await reader.acknowledge(producer.results, entries)
        assert ids[1] not in {result.id for _, result in await reader.results(producer.results)}
        await reader.aclose()


async def look_at_all(server: Server, monitor: Client) -> None:
    await monitor.ping()
    assert (await monitor.depth()).dead_letters == 1
    assert [view.report.name for view in await monitor.workers()] == ["w1"]
    assert [letter.job_id async for letter in monitor.dead_letters()] == ["poison"]
    letter = await monitor.dead_letter("poison")
    assert await monitor.dead_letter(letter.entry_id) == letter
    assert (await monitor.result(letter.job_id, timeout=0)).status is Status.FAILED
    assert await monitor.model_card() == CARD
    assert await queue_names(url_of(server, "monitor")) == [QUEUE]


async def bring_back(operator: Client) -> None:
    letter = await operator.dead_letter("poison")
    assert await operator.purge_dead_letters(["1-1"]) == 0
    again = await operator.requeue(letter)
    assert await operator.purge_dead_letters(None) == 0
    assert (await operator.workers())[0].report.name == "w1"
    assert (await operator.status(again)).state is JobState.WAITING


@pytest.mark.parametrize("user", ["producer", "worker", "monitor", "operator"])
async def test_nobody_reaches_beyond_the_queue(guarded: Server, user: str) -> None:
    """Not by commands, not by scripts, not by the client."""
    with guarded.client() as admin:
        admin.hset(f"tidemill:{{{OTHER}}}:load", "total", 1)
    async with connect(url_of(guarded, user)) as redis:
        for command in (
            *(
                ("FLUSHALL",),
                ("FLUSHDB",),
                ("CONFIG", "GET", "*"),
                ("KEYS", "*"),
                ("ACL", "LIST"),
                ("MONITOR",),
            ),
            *(
                ("SHUTDOWN",),
                ("SCRIPT", "FLUSH"),
                ("CLIENT", "LIST"),
                ("EVAL", "", "0"),
            ),
            *(("HMGET", f"tidemill:{{{OTHER}}}:load", "total"), ("XREAD", "STREAMS", "elsewhere", "0")),
        ):
            with pytest.raises(NoPermissionError):
                await run(redis, *command)
        digest = await redis.script_load(f"return redis.call('HMGET', 'tidemill:{{{OTHER}}}:load', 'total')")
        with pytest.raises(ResponseError, match=r"access a key|access at least one of the keys"):
            await run(redis, "EVALSHA", digest, "0")
    async with client_of(guarded, user, OTHER) as client:
        with pytest.raises(QueueUnavailable, match="does not permit this user what the queue needs"):
            await client.depth()
        with pytest.raises(QueueUnavailable, match="does not permit"):
            await client.submit(make_job("a"))


async def test_several_servers_take_a_few_rights_more() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"`{rule}`" in text for rule in ("+role", "+role +cluster|slots", f"{SEEKER}", "+select"))
    rules = [*documented()["monitor"], "+role", "+cluster|slots", "+select"]
    named = [rule.replace("PASSWORD", PASSWORD).replace("QUEUE", QUEUE) for rule in rules]
    with running_cluster() as cluster, cluster.client() as admin:
        admin.execute_command("ACL", "SETUSER", "tidemill-monitor", *named)
        url = url_of(cluster, "monitor").replace("redis://", "redis+cluster://")
        assert await queue_names(url) == []
        admin.execute_command("ACL", "SETUSER", "tidemill-monitor", "-role")
        with pytest.raises(QueueUnavailable, match="does not permit this user"):
            async with Client(url, queue=QUEUE) as client:
                await client.depth()
    own = ("user default off resetpass -@all", f"user seeker on >{PASSWORD} {SEEKER}")
    with running(valkey_binary()) as server, server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "tidemill-monitor", *named)
        with running_sentinel(valkey_binary(), server, *own) as sentinel:
            credentials = f"?sentinel_username=seeker&sentinel_password={PASSWORD}"
            place = f"tidemill-monitor:{PASSWORD}@127.0.0.1:{sentinel.port}/{SERVICE}/1"
            assert await queue_names(f"redis+sentinel://{place}{credentials}") == []


async def run(redis: Redis, *command: str) -> object:
    return await redis.execute_command(*command)  # type: ignore[no-untyped-call]


async def test_a_monitor_writes_nothing(guarded: Server) -> None:
    async with client_of(guarded, "monitor") as client:
        with pytest.raises(QueueUnavailable, match="does not permit"):
            await client.submit(make_job("new"))
        with pytest.raises(QueueUnavailable, match="does not permit"):
            await client.purge_dead_letters(None)
