"""What restoring costs is learned from the work that tells it, and from no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tidemill_scheduler.costs import RestoreCosts
from tidemill_scheduler.plan import Row
from tidemill_scheduler.sequence import SequenceId
from tidemill_worker.model.lap import HostLap, laps_of
from tidemill_worker.model.restore_speeds import RestoreSpeeds

CHUNK = 100
DEFAULTS = RestoreCosts()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Speeds by a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.speeds = RestoreSpeeds(lambda: HostLap(self.clock))

    def compute(self, counts: Sequence[int], seconds: float) -> RestoreCosts:
        """One step with rows of so many tokens."""
        rows = [Row(SequenceId(index), 0, count, ((),), sample=True) for index, count in enumerate(counts)]
        with self.speeds.computing(rows):
            self.clock.now += seconds
        return self.speeds.costs

    def copy(self, num_blocks: int, seconds: float) -> RestoreCosts:
        with self.speeds.copying(num_blocks):
            self.clock.now += seconds
        return self.speeds.costs


def make_calibrated(seconds_per_token: float = 0.01) -> Bench:
    bench = Bench()
    bench.speeds.calibrate(CHUNK)
    bench.compute([CHUNK], CHUNK * seconds_per_token)
    return bench


def test_before_any_measurement_the_costs_are_the_schedulers_own() -> None:
    assert Bench().speeds.costs == DEFAULTS


def test_a_measured_chunk_and_a_measured_copy_are_taken_at_their_word() -> None:
    bench = make_calibrated(0.01)
    assert bench.copy(16, 0.32).seconds_per_block == pytest.approx(0.02)
    assert bench.speeds.costs.seconds_per_token == pytest.approx(0.01)


@pytest.mark.parametrize(
    "counts",
    [[1] * 3, [1] * 200, [CHUNK // 2 - 1], [CHUNK] + [1] * CHUNK, []],
    ids=["three decodes", "many decodes", "a short prompt", "half of it decodes", "nothing"],
)
def test_a_step_that_says_little_about_prefill_is_not_counted(counts: list[int]) -> None:
    assert make_calibrated(0.01).compute(counts, 50.0).seconds_per_token == pytest.approx(0.01)


@pytest.mark.parametrize(
    "counts",
    [[CHUNK // 2], [25, 25], [CHUNK] + [1] * 20],
    ids=["half a chunk", "two prompts", "some decodes"],
)
def test_a_step_that_is_mostly_prefill_corrects_the_costs(counts: list[int]) -> None:
    costs = make_calibrated(0.01).compute(counts, sum(counts) * 0.03)
    assert 0.01 < costs.seconds_per_token < 0.03


def test_costs_follow_a_change_and_forget_the_past() -> None:
    bench = make_calibrated(0.01)
    for _ in range(100):
        bench.compute([CHUNK], CHUNK * 0.01)
    costs = [bench.compute([CHUNK], CHUNK * 0.02).seconds_per_token for _ in range(50)]
    assert costs == sorted(costs)
    assert costs[5] < 0.015 < costs[6]  # half is forgotten after seven
    assert costs[-1] == pytest.approx(0.02, rel=0.01)


def test_of_two_measurements_the_larger_weighs_more() -> None:
    bench = Bench()
    bench.copy(4, 4 * 0.5)
    assert bench.copy(400, 400 * 0.001).seconds_per_block < 0.01  # their plain mean is 0.25


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_a_copy_of_few_blocks_is_not_counted(num_blocks: int) -> None:
    assert Bench().copy(num_blocks, 9.0) == DEFAULTS


def test_what_was_measured_before_a_calibration_is_forgotten() -> None:
    """The first chunk and the first copy compile and allocate; nobody pays that again."""
    bench = Bench()
    bench.speeds.calibrate(CHUNK)
    bench.compute([CHUNK], 60.0)
    bench.copy(16, 5.0)
    bench.speeds.calibrate(CHUNK)
    assert bench.speeds.costs == DEFAULTS


def test_nothing_is_measured_before_there_is_a_chunk_to_compare_with() -> None:
    assert Bench().compute([CHUNK], 50.0) == DEFAULTS


@dataclass
class LateLap:
    """A device that has not said yet how long it took."""

    seconds: float | None = None

    def stop(self) -> None:
        pass


def test_what_a_device_says_late_is_counted_then_and_in_order() -> None:
    laps: list[LateLap] = []

    def start_lap() -> LateLap:
        laps.append(LateLap())
        return laps[-1]

    speeds = RestoreSpeeds(start_lap)
    for _ in range(2):
        with speeds.copying(10):
            pass
    laps[1].seconds = 20.0
    assert speeds.costs == DEFAULTS  # the first is not known yet
    laps[0].seconds = 10.0
    assert speeds.costs.seconds_per_block == pytest.approx((0.9 * 10.0 + 20.0) / (0.9 * 10 + 10))


@dataclass
class Event:
    """Stands for CUDA's: a point of a stream, that the GPU passes when the test says so."""

    enable_timing: bool
    passed: float | None = None

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.passed is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.passed is not None
        assert end.passed is not None
        return (end.passed - self.passed) * 1e3


def test_a_gpu_is_asked_how_long_it_took_and_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    def make_event(*, enable_timing: bool) -> Event:
        events.append(Event(enable_timing))
        return events[-1]

    monkeypatch.setattr(torch.cuda, "Event", make_event)
    lap = laps_of(torch.device("cuda"))()
    lap.stop()
    start, end = events
    assert start.enable_timing
    assert end.enable_timing
    start.passed = 7.0
    assert lap.seconds is None
    end.passed = 7.5
    assert lap.seconds == 0.5


def test_work_that_fails_is_not_counted() -> None:
    bench = Bench()
    with pytest.raises(RuntimeError, match="out of memory"), bench.speeds.copying(10):
        raise RuntimeError("out of memory")
    assert bench.speeds.costs == DEFAULTS
