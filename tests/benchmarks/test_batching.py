"""What `batching.py` says of what it has measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
from batching import (
    FULL,
    OFFERED_LOADS,
    QUICK,
    STATIC,
    Bench,
    Contender,
    figures_of,
    job_of,
    plot,
    print_contenders,
)
from batching_worker import SETTINGS, Batching, BatchingWorker, Kind, Served, set_scratch_aside
from response_times import Offered, poisson_arrivals
from static_batching import StaticScheduler
from workload import CHAT, Piece, make_workload

from tests.benchmarks.test_workload import Bytes
from tidemill_scheduler import SchedulerConfig
from tidemill_worker.settings import load_settings


def make_contender(
    kind: Kind, *, seconds: float, response_time: float, useful: float, sustained: float
) -> Contender:
    burst = Offered((response_time,) * 4, seconds, num_output_tokens=120, num_useful_tokens=200)
    points = [(0.0, 2.0), (sustained, 4.0), (2 * sustained, 9.0)]
    return Contender(Batching(kind, 8), burst, useful, points if kind in OFFERED_LOADS else [])


def make_contenders() -> dict[Kind, Contender]:
    made = [
        make_contender(Kind.CONTINUOUS, seconds=2.0, response_time=1.0, useful=1.0, sustained=6.0),
        make_contender(Kind.SHRINKING, seconds=2.5, response_time=1.25, useful=1.0, sustained=0.0),
        make_contender(Kind.PACKED, seconds=5.0, response_time=2.5, useful=0.5, sustained=3.0),
        make_contender(Kind.PADDED, seconds=8.0, response_time=4.0, useful=0.25, sustained=1.5),
    ]
    return {contender.batching.kind: contender for contender in made}


def colours(path: Path) -> list[dict[str, str]]:
    """By picture, what its legend says: the colour of each contender's line."""
    groups = [group for group in ElementTree.parse(path).getroot().iter() if "id" in group.attrib]
    return [legend_of(group) for group in groups if group.attrib["id"].startswith("legend_")]


def legend_of(group: ElementTree.Element) -> dict[str, str]:
    lines = [entry for entry in group if entry.attrib["id"].startswith("line2d_")]
    texts = [entry for entry in group if entry.attrib["id"].startswith("text_")]
    return {
        "".join(text.itertext()).strip(): re.findall(r"stroke: (#\w+)", line[0].attrib["style"])[0]
        for text, line in zip(texts, lines, strict=True)
    }


class FromRate(Bench):
    """Its P99 response time is told by the rate at which jobs arrive: 1 s at one a second."""

    def _offer(self, pieces: Sequence[Piece], arrivals: Sequence[float]) -> Offered:
        rate = poisson_arrivals(1.0, len(arrivals))[-1] / arrivals[-1]
        return Offered((rate,) * 4, 1.0, num_output_tokens=1, num_useful_tokens=1)


class Open(BatchingWorker):
    """Serves whatever comes, by doing nothing."""

    def __init__(self) -> None:
        """It has no process."""

    @contextmanager
    def serving(self, batching: Batching) -> Iterator[Served]:
        yield Served()


@pytest.mark.parametrize(
    ("unloaded", "shares"), [(0.3, [0.5, 0.75]), (0.5, list(FULL.loads[:4])), (9.0, FULL.loads)]
)
def test_loads_rise_until_one_passes_the_bound(unloaded: float, shares: Sequence[float]) -> None:
    contender = Contender(Batching(Kind.PADDED, 8), Offered((1.0,), 1.0, 1, 1), useful=1.0)
    FromRate(Open(), "redis://nowhere", "none").load(contender, unloaded, [], FULL)
    (first, *offered) = contender.loads
    assert first == (0.0, unloaded)
    assert offered == [(pytest.approx(share), pytest.approx(share)) for share in shares]


def test_ratios_are_of_continuous_over_static() -> None:
    figures = figures_of(make_contenders(), bound=4.0)
    assert figures == {
        "tokens_ratio": 4.0,
        "tokens_ratio_packed": 2.5,
        "tokens_ratio_shrinking": 1.25,
        "p99_ratio": 0.25,
        "p99_ratio_packed": 0.4,
        "p99_ratio_shrinking": 0.8,
        "mean_ratio": 0.25,
        "mean_ratio_packed": 0.4,
        "mean_ratio_shrinking": 0.8,
        "useful_continuous": 1.0,
        "useful_shrinking": 1.0,
        "useful_packed": 0.5,
        "useful_static": 0.25,
        "load_ratio": 4.0,
        "load_ratio_packed": 2.0,
        "p99_bound_s": 4.0,
        "continuous_tokens_per_s": 60.0,
    }


def test_the_table_says_by_how_much_times_have_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_contenders(make_contenders(), bound=4.0)
    lines = capsys.readouterr().out.splitlines()
    (continuous,) = [line for line in lines if "continuous" in line]
    (padded,) = [line for line in lines if "padded" in line]
    assert continuous.count("-75%") == 2
    assert padded.count("+0%") == 2


def test_a_contender_without_loads_has_a_dash_in_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_contenders(make_contenders(), bound=4.0)
    lines = capsys.readouterr().out.splitlines()
    sustained = {line.split("│")[1].strip(): line.split("│")[-2].strip() for line in lines if ", 8" in line}
    assert sustained == {
        "continuous, 8": "6.00",
        "shrinking static, 8": "-",
        "packed static, 8": "3.00",
        "padded static, 8": "1.50",
    }


def test_a_contender_has_one_colour_in_both_pictures(tmp_path: Path) -> None:
    plot(tmp_path / "batching.svg", make_contenders(), bound=4.0)
    burst, loads = colours(tmp_path / "batching.svg")
    assert list(burst) == ["continuous, 8", "shrinking static, 8", "packed static, 8", "padded static, 8"]
    assert list(loads) == ["continuous, 8", "packed static, 8", "padded static, 8", "the bound"]
    assert {name: burst[name] for name in burst if name in loads} == {
        name: loads[name] for name in loads if name in burst
    }


def test_the_plot_is_an_svg_that_names_contenders_machine_and_commit(tmp_path: Path) -> None:
    plot(tmp_path / "batching.svg", make_contenders(), bound=4.0)
    words = " ".join(ElementTree.parse(tmp_path / "batching.svg").getroot().itertext())
    for word in ("continuous, 8", "packed static, 8", "padded static, 8", "cores of", "a burst", "bound"):
        assert word in words


def test_every_static_batch_fits_the_worker() -> None:
    settings = load_settings(SETTINGS)
    bytes_per_block = 30 * 2 * 3 * 16 * 64 * 4  # of SmolLM2-135M: layers, KV, heads, tokens, width, float32
    config, scratch = set_scratch_aside(
        SchedulerConfig(
            num_blocks=int(3.5 * 2**30) // bytes_per_block,
            max_model_len=1024,
            max_num_seqs=64,
            max_num_batched_tokens=512,
        )
    )
    assert (settings.max_model_len, settings.kv_cache_memory) == (1024, 3.5)
    assert len(scratch) * config.block_size == 512
    assert min(scratch) == config.num_blocks
    for extent in (FULL, QUICK):
        for size in (size for kind in STATIC for size in extent.sizes[kind]):
            StaticScheduler(config, batch_size=size, pads_prompts=True, keeps_ended=True)


def test_the_workload_fits_the_model_and_has_a_long_tail() -> None:
    pieces = make_workload(Bytes(), 1000, lengths=CHAT)
    outputs = sorted(piece.num_output for piece in pieces)
    assert max(len(piece.token_ids) + piece.num_output for piece in pieces) <= 1024
    assert sum(outputs[-100:]) > 0.35 * sum(outputs)  # a tenth of the jobs, more than a third of the tokens


def test_jobs_are_greedy_and_as_long_as_they_are_drawn() -> None:
    params = job_of(Piece("The tide", (1, 2), 9)).params
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (9, 0.0, True)


def test_a_single_size_needs_no_comparison() -> None:
    bench = Bench(Open(), "redis://nowhere", "none")  # to ask would fail: nobody listens
    assert bench.best(Kind.PADDED, [], QUICK) == Batching(Kind.PADDED, 16)
    assert bench.best(Kind.CONTINUOUS, [], FULL) == Batching(Kind.CONTINUOUS, 64)
