"""Tenants share a queue by the tokens they are served, whatever their jobs are like.

The bound is that of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024) for backlogged
clients: what two tenants that both have jobs waiting are served in any span of time differs by 2 U at
most, U being what is under way at once. Here U is the number of places of all workers times the largest
job. Why: when f was last chosen, service S and promises P were S_f + P_f <= S_g + P_g. Since then f was
served no more than it has under way, and S_g has not fallen. So S_f - S_g is at most what f has under way
plus P_g, and no promise exceeds the largest job: U in all. A difference that stays between -U and U
changes by 2 U at most; with weights, by 2 U over the least of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.tidemill.factories import WORKER, make_job, make_result, make_settings, renewal, submit
from tests.tidemill.servers import Server, redis_binary, running, valkey_binary
from tests.tidemill.simulated_workers import SimulatedWorkers, make_jobs, submit_backlog, tenant_of, units
from tidemill.connection import connect
from tidemill.errors import ErrorCode
from tidemill.jobs import ErrorInfo, Status, Timings, Usage
from tidemill.queue import Queue

CHAT = Usage(prompt_tokens=20, completion_tokens=40)
BOOK = Usage(prompt_tokens=400, completion_tokens=300)


@pytest.fixture(params=["valkey", "redis"])
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One that need not be cleared of a hundred thousand jobs."""
    with running({"valkey": valkey_binary, "redis": redis_binary}[request.param]()) as server:
        yield server


@pytest.mark.timeout(240)
async def test_a_job_now_and_then_is_next_before_a_hundred_thousand(own_server: Server) -> None:
    """Then the small tenant has a backlog too, and gets its half from there on."""
    redis = connect(own_server.url)
    queue = Queue(redis, "q", make_settings())
    workers = SimulatedWorkers(queue, lambda tenant: CHAT if tenant == "small" else BOOK)
    await submit_backlog(queue, "big", 100_000)

    for number in range(20):
        await workers.run(5)
        claimed = len(workers.claims)
        await submit(queue, *make_jobs("small", 1, number))
        await workers.run(1)
        assert workers.claims[claimed] == "small"
    await workers.run(4)
    assert workers.served["small"] == 20 * units(CHAT)
    assert workers.served["big"] >= 90 * units(BOOK)

    workers.history.clear()
    workers.served.clear()
    await submit_backlog(queue, "small", 1000, start=20)
    await workers.run(600)
    assert workers.greatest_gap("big", "small") <= 2 * workers.in_flight
    assert min(workers.served.values()) > 2 * workers.in_flight
    assert (await queue.depth()).waiting > 99_000
    await redis.aclose()


async def test_long_and_short_jobs_get_equal_tokens_not_equal_turns(queue: Queue) -> None:
    workers = SimulatedWorkers(queue, lambda tenant: BOOK if tenant == "long" else CHAT, workers=1)
    await submit_backlog(queue, "long", 100)
    await submit_backlog(queue, "short", 600)

    await workers.run(600)

    assert workers.greatest_gap("long", "short") <= 2 * workers.in_flight
    assert min(workers.served.values()) > 10 * workers.in_flight
    assert Counter(workers.claims)["short"] > 8 * Counter(workers.claims)["long"]


async def test_tokens_are_shared_by_weight(queue: Queue) -> None:
    await queue.set_weight("heavy", 3)
    workers = SimulatedWorkers(queue, lambda tenant: BOOK if tenant == "heavy" else CHAT, workers=1)
    await submit_backlog(queue, "heavy", 300)
    await submit_backlog(queue, "light", 400)

    await workers.run(450)

    assert workers.greatest_gap("heavy", "light", weights=(3, 1)) <= 2 * workers.in_flight
    assert workers.served["heavy"] / workers.served["light"] == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("sizes", range(3))
async def test_jobs_of_any_size_are_shared_within_the_bound(queue: Queue, sizes: int) -> None:
    """Lognormal sizes, as those of real answers are, of means that differ by four."""
    chance = random.Random(sizes)

    def usage_of(tenant: str) -> Usage:
        generated = chance.lognormvariate({"a": 3.0, "b": 4.4}[tenant], 1)
        return Usage(prompt_tokens=chance.randrange(100), completion_tokens=int(generated))

    workers = SimulatedWorkers(queue, usage_of)
    for tenant in "ab":
        await submit_backlog(queue, tenant, 400)

    await workers.run(400)

    assert workers.greatest_gap("a", "b") <= 2 * workers.in_flight
    assert min(workers.served.values()) > 2 * workers.in_flight


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
async def test_having_been_away_is_neither_credit_nor_debt(queue: Queue, known: bool) -> None:
    """Who used a queue that nobody else wanted owes nothing for it either."""
    workers = SimulatedWorkers(queue, lambda tenant: CHAT)
    await submit_backlog(queue, "busy", 700)
    if known:
        await submit_backlog(queue, "away", 10)
    await workers.run(300)
    workers.history.clear()
    workers.served.clear()

    await submit_backlog(queue, "away", 400, start=10)
    await workers.run(300)

    assert workers.greatest_gap("busy", "away") <= 2 * workers.in_flight
    assert min(workers.served.values()) > 10 * workers.in_flight


async def test_who_comes_while_nobody_waits_starts_where_the_last_one_was(queue: Queue) -> None:
    """All that waited is under way; those jobs were no less served for that."""
    workers = SimulatedWorkers(queue, lambda tenant: CHAT)
    await submit_backlog(queue, "busy", 201)
    await workers.run(200)
    workers.history.clear()
    workers.served.clear()

    await submit_backlog(queue, "new", 200)
    await submit_backlog(queue, "busy", 200, start=201)
    await workers.run(200)

    assert workers.greatest_gap("busy", "new") <= 2 * workers.in_flight
    assert min(workers.served.values()) > 10 * workers.in_flight


async def test_leaving_and_coming_back_does_not_shake_off_what_one_was_served(queue: Queue) -> None:
    workers = SimulatedWorkers(queue, lambda tenant: BOOK if tenant == "fickle" else CHAT, workers=1, room=1)
    await submit_backlog(queue, "loyal", 500)
    submitted = 0
    for _ in range(300):
        if workers.served["fickle"] == submitted * units(BOOK):
            await submit(queue, *make_jobs("fickle", 1, submitted))
            submitted += 1
        await workers.run(1)

    assert workers.greatest_gap("fickle", "loyal") <= 2 * workers.in_flight
    assert min(workers.served.values()) > 10 * workers.in_flight


async def test_a_burst_of_claims_goes_round_before_anything_was_served(queue: Queue) -> None:
    for tenant in "abc":
        await submit_backlog(queue, tenant, 40)

    claims = [tenant_of(job.job_id) for job in await queue.claim(WORKER, 90)]

    assert all(sorted(claims[start : start + 3]) == ["a", "b", "c"] for start in range(0, 90, 3))


async def test_a_newcomer_does_not_get_a_whole_burst(queue: Queue) -> None:
    """Though it was served no more than the others, each of its jobs is promised something."""
    workers = SimulatedWorkers(queue, lambda tenant: BOOK, workers=1, room=1)
    await submit_backlog(queue, "old", 100)
    await workers.run(10)

    await submit_backlog(queue, "new", 100)
    claims = Counter(tenant_of(job.job_id) for job in await queue.claim(WORKER, 40))

    assert claims == {"old": 20, "new": 20}


async def test_jobs_that_are_all_refused_do_not_keep_everybody_else_waiting(queue: Queue) -> None:
    """They get no token; but who gets nothing would be served least for ever."""
    await submit(queue, *(make_job(f"wrong-{i}", tenant="wrong") for i in range(40)))
    await submit(queue, *(make_job(f"right-{i}", tenant="right") for i in range(40)))
    error = ErrorInfo(code=ErrorCode.INVALID_REQUEST, message="wrong")
    order = []
    for _ in range(40):
        (claimed,) = await queue.claim(WORKER, 1)
        order.append(tenant_of(claimed.job_id))
        refused = make_result(claimed.job_id, status=Status.FAILED, error=error)
        await queue.finish(WORKER, claimed.attempt, refused)

    assert Counter(order) == {"wrong": 20, "right": 20}


@pytest.mark.parametrize("status", [Status.EXPIRED, Status.CANCELLED])
async def test_jobs_that_all_end_amid_their_prompts_leave_others_their_share(
    queue: Queue, status: Status
) -> None:
    """They get no token either; but workers compute long prompts for them."""
    await submit_backlog(queue, "hasty", 40)
    await submit_backlog(queue, "patient", 40)
    begun = Usage(prompt_tokens=units(CHAT))
    order = []
    for _ in range(40):
        (claimed,) = await queue.claim(WORKER, 1)
        order.append(tenant_of(claimed.job_id))
        result = make_result(claimed.job_id, usage=CHAT)
        if order[-1] == "hasty":
            result = make_result(claimed.job_id, status=status, usage=begun, timings=Timings(waiting=0.1))
        await queue.finish(WORKER, claimed.attempt, result)

    assert Counter(order) == {"hasty": 20, "patient": 20}


async def test_a_newcomer_is_lifted_to_who_was_served_least_of_unequal_ones(queue: Queue) -> None:
    """Not to who was served most: it would wait until the others are level."""
    for tenant in ("most", "least"):
        await submit_backlog(queue, tenant, 10)
    held = {tenant_of(job.job_id): job for job in await queue.claim(WORKER, 2)}
    await queue.renew(WORKER, [renewal(held["most"], 500), renewal(held["least"], 5)])

    await submit_backlog(queue, "new", 10)
    claims = Counter(tenant_of(job.job_id) for job in await queue.claim(WORKER, 8))

    assert claims == {"least": 4, "new": 4}


async def test_priorities_keep_accounts_of_their_own(queue: Queue) -> None:
    """What a tenant is served in a hurry does not put its other jobs behind those of others."""
    await submit(queue, *(make_job(f"a-{i}", tenant="a", priority="high") for i in range(5)))
    for tenant in "ab":
        await submit_backlog(queue, tenant, 10, start=5)
    workers = SimulatedWorkers(queue, lambda tenant: BOOK, workers=1, room=1)

    await workers.run(15)

    assert Counter(workers.claims[5:]) == {"a": 5, "b": 5}
