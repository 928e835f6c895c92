"""Response times and loads: what the figures of `batching.py` are made of."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from response_times import Offered, offer, poisson_arrivals, sustained_load

from tests.worker.factories import FakeEngine, Place, eventually, make_job, running_worker
from tidemill.errors import JobFailed

UNLOADED = (0.0, 4.0)


def make_offered(*response_times: float, seconds: float = 10.0, tokens: int = 50) -> Offered:
    return Offered(response_times, seconds, num_output_tokens=tokens, num_useful_tokens=80)


def test_percentiles_lie_between_the_two_nearest() -> None:
    offered = make_offered(*map(float, range(101)))
    assert offered.p99 == 99.0
    assert offered.mean == 50.0
    assert make_offered(1.0, 2.0).p99 == pytest.approx(1.99)
    assert make_offered(3.0).p99 == 3.0


def test_speed_is_over_the_whole_time() -> None:
    offered = make_offered(1.0, 2.0, 3.0, 4.0, seconds=8.0, tokens=50)
    assert (offered.tokens_per_second, offered.jobs_per_second) == (6.25, 0.5)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([UNLOADED, (1.0, 6.0), (2.0, 10.0)], 1.5),
        ([UNLOADED, (1.0, 12.0)], 0.5),
        ([UNLOADED, (1.0, 5.0), (2.0, 8.0)], 2.0),
        ([UNLOADED, (1.0, 12.0), (2.0, 6.0)], 0.5),  # past it once is past it
    ],
)
def test_the_sustained_load_is_where_the_bound_is_first_passed(
    points: list[tuple[float, float]], expected: float
) -> None:
    assert sustained_load(points, 8.0) == expected


def test_a_bound_below_the_unloaded_queue_is_refused() -> None:
    with pytest.raises(ValueError, match="bound is 3, the unloaded queue's response time 4"):
        sustained_load([UNLOADED, (1.0, 6.0)], 3.0)


@given(rate=st.floats(0.01, 50.0), count=st.integers(1, 200), seed=st.integers(0, 9))
def test_arrivals_ascend(rate: float, count: int, seed: int) -> None:
    arrivals = poisson_arrivals(rate, count, seed=seed)
    assert len(arrivals) == count
    assert all(earlier < later for earlier, later in pairwise([0.0, *arrivals]))


def test_arrivals_come_at_their_rate() -> None:
    gaps = [later - earlier for earlier, later in pairwise(poisson_arrivals(4.0, 4000))]
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.05)


def test_a_higher_rate_is_the_same_pattern_in_less_time() -> None:
    slow, fast = poisson_arrivals(1.0, 30), poisson_arrivals(3.0, 30)
    assert [arrival / 3 for arrival in slow] == pytest.approx(fast)


async def test_every_job_has_its_response_time(place: Place) -> None:
    jobs = [make_job(f"Mill {number}", params={"max_tokens": 3 + number}) for number in range(5)]
    async with running_worker(place), place.client() as client:
        offered = await offer(client, jobs, [0.0, 0.0, 0.01, 0.05, 0.05])
    assert len(offered.response_times) == 5
    assert 0.0 < min(offered.response_times) <= max(offered.response_times) <= offered.seconds
    assert offered.num_output_tokens == sum(range(3, 8))
    assert offered.num_useful_tokens > offered.num_output_tokens


async def test_a_job_is_submitted_when_due_though_nobody_answers(place: Place) -> None:
    engine = FakeEngine(paced=True)
    jobs = [make_job(f"Mill {number}") for number in range(3)]
    async with running_worker(place, engine=engine), place.client() as client:
        offering = asyncio.create_task(offer(client, jobs, [0.0, 0.01, 0.02]))
        await eventually(lambda: len(engine.seen) == 3)
        assert not offering.done()
        engine.free()
        assert len((await offering).response_times) == 3


async def test_a_failed_job_ends_the_measurement(place: Place) -> None:
    job = make_job("Mill", params={"max_tokens": 60})
    async with running_worker(place, engine=FakeEngine(max_prompt=0)), place.client() as client:
        with pytest.raises(ExceptionGroup) as raised:
            await offer(client, [job], [0.0])
    assert raised.group_contains(JobFailed)
