"""The loads of the scheduling benchmark are in a steady state, and are what their names say."""

from __future__ import annotations

from functools import partial

import pytest
from scheduling import TURN, measure
from standing_load import OUTPUT_TOKENS, EngineLoad, Load, SchedulerLoad, settle


def make_loads(running: int = 4, waiting: int = 30) -> dict[str, Load]:
    return {
        f"step_us_{running}_{waiting}": SchedulerLoad(running, waiting),
        f"step_us_{running}_{waiting}_scarce": SchedulerLoad(running, waiting, scarce=True),
        f"engine_step_us_{running}_{waiting}": EngineLoad(running, waiting),
    }


@pytest.mark.parametrize(
    ("name", "scarce"),
    [("step_us_4_30", False), ("step_us_4_30_scarce", True), ("engine_step_us_4_30", False)],
)
def test_whoever_ends_is_replaced(name: str, scarce: bool) -> None:
    load = make_loads()[name]
    assert load.name == name
    settle(load)
    scheduler, running = load.scheduler, []
    for _ in range(OUTPUT_TOKENS[1]):
        assert load.step() > 0.0
        assert scheduler.num_running + scheduler.num_waiting == 4 + 30
        running.append(scheduler.num_running)
    scheduler.check_integrity()
    assert max(running) == 4
    assert (scheduler.counters.num_preemptions > 0) == scarce
    assert scarce or min(running) >= 2  # those that ended in this step have not been replaced yet


def test_no_prompt_is_found_in_the_prefix_cache() -> None:
    load = SchedulerLoad(4, 30)
    settle(load)
    assert load.scheduler.counters.num_prefix_query_tokens > 0
    assert load.scheduler.counters.num_prefix_hit_tokens == 0


def test_each_contender_takes_its_turn_each_round() -> None:
    timings = measure([partial(SchedulerLoad, 2, 5), partial(EngineLoad, 2, 5)], rounds=3)
    assert [timing.name for timing in timings] == ["step_us_2_5", "engine_step_us_2_5"]
    for timing in timings:
        assert len(timing.microseconds) == len(timing.running) == 3 * TURN
        assert min(timing.microseconds) <= timing.median <= max(timing.microseconds)
        assert timing.preemptions == 0
