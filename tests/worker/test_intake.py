"""How many jobs a worker claims, by what its engine has to say after a step."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.factories import make_held, make_stats
from tidemill.errors import QueueUnavailable
from tidemill.moves import Claimed
from tidemill_worker.engine import EngineStats
from tidemill_worker.held import HeldJobs
from tidemill_worker.intake import MAX_WAITING_BYTES, Intake


def make_intake(
    stats: EngineStats | None = None,
    *,
    queue: Any = None,
    num_held: int = 0,
    num_ended: int = 0,
    result_bytes: int = 0,
    backlog: int = 0,
    capacity: int = 72,
    claim_ahead: int = 8,
) -> Intake:
    """One that is asked about its room; it claims nothing without a `queue`."""
    held = HeldJobs()
    for number in range(num_held + num_ended):
        ended = number < num_ended
        held.hold(make_held(str(number), params={}, ended=ended, result_bytes=result_bytes if ended else 0))
    stats = stats or make_stats()
    unused: Any = None
    engine: Any = SimpleNamespace(stats=stats, backlog=backlog)
    return Intake(
        queue,
        unused,
        held,
        worker="w1",
        fingerprint="f1",
        capacity=capacity,
        claim_ahead=claim_ahead,
        engine=engine,
        changed=asyncio.Event(),
        reclaim_interval=1.0,
        answer=unused,
        claimed=unused,
        unreachable=lambda error: None,
    )


@pytest.mark.parametrize(
    ("stats", "num_held", "room"),
    [
        pytest.param({}, 0, 72, id="idle"),
        pytest.param({"num_running": 30, "num_rows": 30}, 30, 42, id="nobody waits"),
        pytest.param({"num_running": 30, "num_rows": 30, "num_waiting": 2}, 32, 6, id="short of memory"),
        pytest.param({"num_running": 30, "num_rows": 30, "num_waiting": 20}, 50, 0, id="too many held"),
        pytest.param({"num_rows": 20, "num_waiting": 12}, 12, 16, id="all of the step ended"),
        pytest.param({"num_running": 10, "num_rows": 30, "num_waiting": 12}, 22, 16, id="some of it ended"),
        pytest.param({"num_running": 30, "num_rows": 20, "num_waiting": 4}, 34, 4, id="some had no row"),
        pytest.param({"num_running": 30, "num_waiting": 5, "num_aside": 5}, 35, 37, id="all stand aside"),
        pytest.param({"num_running": 30, "num_waiting": 5, "num_aside": 4}, 35, 3, id="most stand aside"),
        pytest.param({"num_running": 70, "num_waiting": 1}, 71, 1, id="at most the capacity"),
    ],
)
def test_room_is_for_what_the_engine_can_run_and_a_few_more(
    stats: dict[str, int], num_held: int, room: int
) -> None:
    assert make_intake(make_stats(**stats), num_held=num_held).room == room


@pytest.mark.parametrize(
    ("stats", "num_held", "room"),
    [
        pytest.param({"num_rows": 20, "num_waiting": 12}, 12, 8, id="all of the step ended"),
        pytest.param({"num_rows": 20, "num_waiting": 20}, 20, 0, id="the next step is full"),
        pytest.param({"num_waiting": 3}, 0, 1, id="what waited has just been cancelled"),
    ],
)
def test_without_looking_ahead_there_is_room_for_one_step(
    stats: dict[str, int], num_held: int, room: int
) -> None:
    assert make_intake(make_stats(**stats), num_held=num_held, claim_ahead=0).room == room


@pytest.mark.parametrize(
    ("fits", "too_much"),
    [
        pytest.param({"num_ended": 71}, {"num_ended": 72}, id="results"),
        pytest.param(
            {"num_ended": 2, "result_bytes": MAX_WAITING_BYTES // 2 - 1},
            {"num_ended": 2, "result_bytes": MAX_WAITING_BYTES // 2},
            id="large results",
        ),
        pytest.param({"backlog": 71}, {"backlog": 72}, id="requests that the engine does not take in"),
    ],
)
def test_nothing_is_claimed_while_something_piles_up(fits: dict[str, int], too_much: dict[str, int]) -> None:
    going, paused = make_intake(**fits), make_intake(**too_much)
    assert (going.room, going.is_paused) == (72, False)
    assert (paused.room, paused.is_paused) == (0, True)


async def test_a_refusal_stands_until_redis_has_answered() -> None:
    """Given a worker as full as urgent jobs can make it, then it asks for nothing, and knows no better."""
    asked: list[int] = []

    async def claim(worker: str, room: int, **_: object) -> list[Claimed]:
        asked.append(room)
        return []

    for num_held, rooms, is_paused in ((9, [], True), (8, [1], False)):
        intake = make_intake(queue=SimpleNamespace(claim=claim), num_held=num_held, capacity=8)
        intake._note_refusal(QueueUnavailable("out of memory"))
        await intake._take()
        assert (asked, intake.is_paused) == (rooms, is_paused)
