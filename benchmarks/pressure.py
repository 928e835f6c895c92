"""What too little KV memory costs, by the way in which preempted sequences are brought back.

300 requests at once, a model of half a billion parameters, and pools of 1600, 800 and 400 blocks
where 4200 would be used: the measurement of vllm#54644, which reports 32, 58 and 79 % of all tokens
recomputed by an engine that can only recompute. That was a real run of another workload; these are
simulated, so the shares cannot be compared one to one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from request_trace import TracedRequest, draw_trace
from rich.console import Console
from rich.table import Table
from roofline import Roofline
from simulation_report import peak_blocks, recomputed_share, tokens_per_second
from simulator import Simulation, Simulator
from workload import LogNormal

from tidemill_scheduler import PreemptionMode, SchedulerConfig

NUM_REQUESTS = 300
PROMPTS = LogNormal(110, 0.7, (16, 1024))
OUTPUTS = LogNormal(240, 0.8, (16, 1024))
"""Chosen so that all requests run together and use about 4200 blocks of 16 at the most."""
ENDLESS = 8192
"""Blocks, more than the whole trace fills at once."""
POOLS = (1600, 800, 400)
"""Blocks."""


@dataclass(frozen=True, slots=True)
class Point:
    """One pool and one way to bring sequences back."""

    num_blocks: int
    mode: PreemptionMode
    recomputed_share: float
    """Of all tokens computed."""
    tokens_ratio: float
    """Tokens per second over those with endless memory."""
    num_preemptions: int
    num_swapped: int
    """Preemptions whose blocks were kept for the swap space."""
    num_blocks_swapped_in: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """All points, and what they are compared with."""

    peak_blocks: int
    """Blocks in use at once with endless memory."""
    tokens_per_s: float
    """With endless memory."""
    points: list[Point]


def draw_pressure(*, seed: int) -> list[TracedRequest]:
    """The burst that all pools are measured with."""
    return draw_trace(NUM_REQUESTS, prompts=PROMPTS, outputs=OUTPUTS, seed=seed)


def sweep(
    config: SchedulerConfig,
    roofline: Roofline,
    trace: Sequence[TracedRequest],
    *,
    pools: Iterable[int] = POOLS,
    modes: Iterable[PreemptionMode] = (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP),
) -> Sweep:
    """Simulate the trace with endless memory, then with each pool and mode.

    `config` says all but the pool and the mode; its swap space is there for every mode but recompute.
    """
    modes = tuple(modes)
    endless = Simulator(replace(config, num_blocks=ENDLESS), roofline, trace).run()
    points = []
    for num_blocks in pools:
        for mode in modes:
            num_swap_blocks = 0 if mode is PreemptionMode.RECOMPUTE else config.num_swap_blocks
            starved = replace(
                config, num_blocks=num_blocks, num_swap_blocks=num_swap_blocks, preemption_mode=mode
            )
            points.append(_point(Simulator(starved, roofline, trace).run(), endless))
    return Sweep(peak_blocks(endless), tokens_per_second(endless), points)


def _point(starved: Simulation, endless: Simulation) -> Point:
    scheduler = starved.scheduler
    return Point(
        scheduler.config.num_blocks,
        scheduler.config.preemption_mode,
        recomputed_share(starved),
        tokens_per_second(starved) / tokens_per_second(endless),
        scheduler.counters.num_preemptions,
        scheduler.counters.num_swap_preemptions,
        scheduler.counters.num_blocks_swapped_in,
    )


def sweep_figures(result: Sweep) -> dict[str, float]:
    """By names that say the mode and the pool."""
    figures: dict[str, float] = {"peak_blocks": result.peak_blocks, "tokens_per_s": result.tokens_per_s}
    for point in result.points:
        figures[f"recomputed_share_{point.mode}_{point.num_blocks}"] = point.recomputed_share
        figures[f"tokens_ratio_{point.mode}_{point.num_blocks}"] = point.tokens_ratio
        figures[f"preemptions_{point.mode}_{point.num_blocks}"] = point.num_preemptions
    return figures


def print_sweep(result: Sweep) -> None:
    table = Table(title=f"{result.peak_blocks} blocks used, {result.tokens_per_s:.0f} tokens/s if endless")
    for column in ("blocks", "mode", "recomputed", "tokens/s", "preempted", "swapped", "blocks in"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for point in result.points:
        table.add_row(
            str(point.num_blocks),
            point.mode,
            f"{point.recomputed_share:.1%}",
            f"{point.tokens_ratio:.1%}",
            str(point.num_preemptions),
            str(point.num_swapped),
            str(point.num_blocks_swapped_in),
        )
    Console().print(table)


def plot_sweep(result: Sweep, path: Path, *, title: str) -> None:
    """Draw both shares over the pool; the format is that of the suffix of `path`."""
    figure = Figure(figsize=(7.0, 3.5), layout="constrained")
    recomputed, tokens = figure.subplots(1, 2)
    figure.suptitle(title)
    for mode in dict.fromkeys(point.mode for point in result.points):
        points = [point for point in result.points if point.mode is mode]
        _plot_line(recomputed, mode, points, [point.recomputed_share for point in points])
        _plot_line(tokens, mode, points, [point.tokens_ratio for point in points])
    recomputed.set(xlabel="blocks", ylabel="tokens recomputed, share", ylim=(0.0, None))
    tokens.set(xlabel="blocks", ylabel="tokens/s over endless memory's", ylim=(0.0, 1.02))
    recomputed.legend()
    figure.savefig(path)


def _plot_line(axes: Axes, mode: str, points: Sequence[Point], shares: Sequence[float]) -> None:
    axes.plot([point.num_blocks for point in points], shares, marker="o", label=mode)
