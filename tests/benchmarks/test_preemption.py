"""The starved pool: a queue that never runs dry, what is counted in its window, and the figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from measure import Run, Series
from preemption import LENGTHS, Contender, Extent, NoModel, Workload, figures_of
from workload import Piece

from tests.worker.factories import make_stats, make_tokenizer
from tidemill_scheduler import PreemptionMode
from tidemill_worker.model.loader import LoadedModel

EXTENT = Extent(in_flight=6, warm_up=200, window=300)


def make_work() -> Workload:
    """Requests of 3 prompt tokens that generate 64 to 103; nothing looks at the model."""
    pieces = [Piece("", (1, 2, 3), 64 + index) for index in range(40)]
    return Workload(EXTENT, pieces, cast(LoadedModel, None), make_tokenizer())


def run(contender: Contender) -> Contender:
    contender.run(make_work(), NoModel())
    return contender


def make_contender(name: str, *, recomputed: int, computed: int, tokens: list[int]) -> Contender:
    """One whose window is known, and in which request 0 has ended."""
    contender = Contender(name, 10, num_computed=computed, tokens={"0": tokens}, ended={"0"})
    contender.before = make_stats(recomputed_tokens=5)
    contender.after = make_stats(recomputed_tokens=5 + recomputed)
    return contender


def test_those_in_flight_are_always_as_many() -> None:
    contender = run(Contender("endless", 600))
    assert len(contender.tokens) == EXTENT.in_flight + len(contender.ended)
    assert contender.ended


def test_an_endless_pool_preempts_nobody_and_says_what_is_needed() -> None:
    contender = run(Contender("endless", 600))
    assert contender.since_warm_up(lambda stats: stats.num_preemptions) == 0
    longest = 3 + max(piece.num_output for piece in make_work().pieces)
    assert EXTENT.in_flight < contender.peak_blocks <= EXTENT.in_flight * -(-longest // 16)


def test_the_window_holds_what_was_asked_for() -> None:
    contender = run(Contender("endless", 600))
    tokens = contender.since_warm_up(lambda stats: stats.generation_tokens)
    assert EXTENT.window <= tokens < EXTENT.window + EXTENT.in_flight


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_a_starved_pool_recomputes_or_swaps(mode: PreemptionMode) -> None:
    contender = run(Contender("starved", 14, num_swap_blocks=40, mode=mode))
    assert contender.since_warm_up(lambda stats: stats.num_preemptions) > 0
    swapped = contender.since_warm_up(lambda stats: stats.blocks_swapped_in)
    assert (swapped > 0) == (mode is PreemptionMode.SWAP)
    if mode is PreemptionMode.RECOMPUTE:
        assert 0.0 < contender.recomputed_share < 1.0


def test_the_pool_holds_any_requests_in_flight() -> None:
    longest = LENGTHS.prompt.bounds[1] + LENGTHS.output.bounds[1]
    assert make_work().endless_blocks * 16 >= EXTENT.in_flight * longest


class TestFigures:
    def make(self, **changes: Any) -> dict[str, float]:
        contenders = [
            make_contender("endless", recomputed=0, computed=100, tokens=[1, 2]),
            make_contender("auto", recomputed=1, computed=100, tokens=[1, 2]),
            make_contender("recompute", recomputed=60, computed=160, tokens=changes.get("tokens", [1, 2])),
        ]
        if changes.get("none_in_common"):
            contenders[1] = replace(contenders[1], ended=set())
        seconds = {"endless": 1.0, "auto": 1.25, "recompute": 2.0}
        series = [Series(name, 50, [Run(took)]) for name, took in seconds.items()]
        return figures_of(contenders, series)

    def test_are_ratios_and_shares_of_the_window(self) -> None:
        assert self.make() == {
            "recomputed_share_recompute": 60 / 160,
            "recomputed_share_auto": 1 / 100,
            "tokens_ratio": 0.8,
            "tokens_ratio_recompute": 0.5,
            "tokens_identical": 1.0,
            "requests_compared": 1,
        }

    def test_another_token_is_seen(self) -> None:
        assert self.make(tokens=[1, 3])["tokens_identical"] == 0.0

    def test_it_is_said_how_many_were_compared(self) -> None:
        assert self.make(none_in_common=True)["requests_compared"] == 0
