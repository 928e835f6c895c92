"""A move takes effect and its reply is lost on the wire: whoever asked asks again, and it is done once.

Each reply is lost twice in a row: the connection's own second try and the product's are both needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.polling import until
from tests.faults.factories import LEASE, PATIENCE, Place, make_job, make_jobs, open_place, persist
from tests.faults.invariants import Answers, assert_delivered, assert_undisturbed
from tests.faults.sabotage import KILLS_IN_PREPARATION, Sabotaged
from tests.tidemill.proxy import Proxy, proxy_to
from tests.tidemill.servers import Server
from tidemill.jobs import Status
from tidemill.moves import CancelOutcome, QueueSettings
from tidemill.scripts import Move, load_scripts

LOSSES = 2
SCRIPTS = load_scripts()


@pytest.fixture
async def proxy(shared_server: Server) -> AsyncIterator[Proxy]:
    with shared_server.client() as client:
        for script in SCRIPTS.values():
            client.script_load(script.source)  # or the first replies would say that there is no such script
    async with proxy_to(shared_server.port) as opened:
        yield opened


@pytest.fixture
async def behind(
    request: pytest.FixtureRequest, proxy: Proxy, shared_server: Server, model: Path, tmp_path: Path
) -> AsyncIterator[Place]:
    """A place whose workers reach the server through the proxy, unless told otherwise."""
    lease = getattr(request, "param", LEASE)
    flags = {"worker_url": proxy.url, "settings": QueueSettings(lease=lease), "lease": lease}
    async with open_place(shared_server, model, tmp_path, **flags) as opened:
        yield opened


within_one_lease = pytest.mark.parametrize("behind", [PATIENCE], indirect=True, ids=["long lease"])
"""For what must be put right by asking again, not by waiting until a lease ends."""
longer_than_asking_again = pytest.mark.parametrize("behind", [2 * LEASE], indirect=True, ids=["double lease"])
"""For what begins with the end of a lease, and must be put right within the next one."""


def lose_replies(proxy: Proxy, move: Move) -> list[asyncio.Event]:
    return [proxy.lose_reply("EVALSHA", SCRIPTS[move].digest) for _ in range(LOSSES)]


async def all_of(events: list[asyncio.Event]) -> None:
    async with asyncio.timeout(PATIENCE):
        for event in events:
            await event.wait()


async def lapsed(place: Place) -> None:
    """Return once nobody's lease is good any more."""

    async def none_runs() -> bool:
        return (await place.queue.depth()).running == 0

    await until(none_runs, timeout=PATIENCE)


@within_one_lease
async def test_of_a_claim(behind: Place, proxy: Proxy, answers: Answers) -> None:
    """The worker is given the same jobs again, at the same attempt."""
    jobs = make_jobs(4)
    await behind.submit(*jobs)
    lost = lose_replies(proxy, Move.CLAIM)
    await behind.start_ready()
    await all_of(lost)
    results = await assert_undisturbed(behind, jobs, answers)
    assert [result.attempts for result in results] == [1, 1, 1, 1]
    await assert_delivered(behind)


@longer_than_asking_again
async def test_of_a_reclaim(behind: Place, proxy: Proxy, answers: Answers) -> None:
    jobs = make_jobs(4, params={"max_tokens": 200})
    await behind.submit(*jobs)
    victim = await behind.start_ready()
    await behind.under_way(jobs, victim)
    victim.kill()
    await lapsed(behind)
    lost = lose_replies(proxy, Move.RECLAIM)
    await behind.start_ready()
    await all_of(lost)
    results = await assert_undisturbed(behind, jobs, answers)
    assert [result.attempts for result in results] == [2, 2, 2, 2]
    await assert_delivered(behind)


@within_one_lease
async def test_of_a_renewal(behind: Place, proxy: Proxy, answers: Answers) -> None:
    """Tokens that were stored already are stored once, and told once."""
    jobs = make_jobs(4, params={"max_tokens": 200})
    worker = await behind.start_ready()
    await behind.submit(*jobs)
    await behind.under_way(jobs, worker)
    lost = lose_replies(proxy, Move.RENEW)
    await all_of(lost)
    results = await assert_undisturbed(behind, jobs, answers)
    assert [result.attempts for result in results] == [1, 1, 1, 1]
    await assert_delivered(behind)


@within_one_lease
async def test_of_a_finish(behind: Place, proxy: Proxy, answers: Answers) -> None:
    """It learns that its result was recorded, and does not take itself for a zombie."""
    job = make_job(params={"max_tokens": 20})
    lost = lose_replies(proxy, Move.FINISH)
    worker = await behind.start_ready(log_level="debug")
    await behind.submit(job)
    await all_of(lost)
    await assert_undisturbed(behind, [job], answers)
    await until(lambda: "outcome=already" in worker.log.read_text(), timeout=PATIENCE)
    await assert_delivered(behind)


@within_one_lease
async def test_of_a_release(behind: Place, proxy: Proxy, answers: Answers) -> None:
    """What was handed back is another's by the time that the draining worker asks again."""
    jobs = make_jobs(4, params={"max_tokens": 300})
    successor = await behind.start_ready(redis_url=behind.server.url)
    successor.freeze()
    drained = await behind.start_ready(grace_period=0)
    await behind.submit(*jobs)
    await behind.under_way(jobs, drained)
    successor.thaw()
    lost = lose_replies(proxy, Move.RELEASE)
    drained.terminate()
    await all_of(lost)
    results = await assert_undisturbed(behind, jobs, answers)
    assert all(successor.holds(result.worker) for result in results)
    assert await asyncio.to_thread(drained.wait) == 0
    await assert_delivered(behind)


async def test_of_the_beginning_of_a_suspect(behind: Place, proxy: Proxy, answers: Answers) -> None:
    """One more failure would bury it; it is begun once its worker is sure to be its holder."""
    job = make_job(KILLS_IN_PREPARATION)
    await behind.submit(job)
    victim = behind.start(max_attempts=2)
    await until(lambda: not victim.is_alive, timeout=PATIENCE)
    lost = lose_replies(proxy, Move.BEGIN)
    await behind.start_ready(Sabotaged(fatal=False), max_attempts=2)
    await all_of(lost)
    (result,) = await assert_undisturbed(behind, [job], answers)
    assert result.attempts == 2
    await assert_delivered(behind)


@pytest.fixture
async def cut_off(proxy: Proxy, shared_server: Server, model: Path, tmp_path: Path) -> AsyncIterator[Place]:
    """A place whose client reaches the server through the proxy."""
    async with open_place(shared_server, model, tmp_path, url=proxy.url) as opened:
        yield opened


async def test_of_a_submission(cut_off: Place, proxy: Proxy, answers: Answers) -> None:
    """The client may not know whether its job is in the queue; it submits it again, and it is one job."""
    jobs = make_jobs(4)
    lost = lose_replies(proxy, Move.SUBMIT)
    await cut_off.submit(*jobs)
    await all_of(lost)
    await cut_off.start_ready()
    await assert_undisturbed(cut_off, jobs, answers)
    await assert_delivered(cut_off)


async def test_of_a_cancellation(cut_off: Place, proxy: Proxy) -> None:
    job = make_job()
    await cut_off.submit(job)
    lost = lose_replies(proxy, Move.CANCEL)
    assert await persist(lambda: cut_off.client.cancel(job.id)) is CancelOutcome.CANCELLED
    await all_of(lost)
    (result,) = await cut_off.results([job])
    assert result.status is Status.CANCELLED
    await assert_delivered(cut_off)
