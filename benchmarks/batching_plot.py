"""The comparison of ways of batching, in two pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def plot_batching(
    path: Path,
    *,
    bursts: Mapping[str, Sequence[float]],
    loads: Mapping[str, Sequence[tuple[float, float]]],
    bound: float,
    caption: str,
) -> None:
    """Draw how the burst's response times are distributed, and the 99th percentile over the load.

    Args:
        path: of the SVG file.
        bursts: by contender, the response times in seconds.
        loads: by contender, (jobs a second, 99th percentile in seconds), the loads ascending; without
            any, a contender has no line. In the order of `bursts`.
        bound: on the 99th percentile, in seconds.
        caption: what the figures were measured on.
    """
    # Text stays text, and a new run changes only what it measured.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "batching"}):
        figure = Figure(figsize=(9.0, 4.0), layout="constrained")
        burst, load = figure.subplots(1, 2)
        _plot_burst(burst, bursts)
        _plot_loads(load, loads, bound)
        figure.supxlabel(caption, fontsize="x-small", color="gray")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _plot_burst(axes: Axes, bursts: Mapping[str, Sequence[float]]) -> None:
    for name, response_times in bursts.items():
        axes.ecdf(response_times, label=name)
    axes.set(title="a burst", xlabel="response time in seconds", ylabel="share of the jobs", xlim=(0.0, None))
    axes.legend()


def _plot_loads(axes: Axes, loads: Mapping[str, Sequence[tuple[float, float]]], bound: float) -> None:
    for number, (name, points) in enumerate(loads.items()):
        if points:  # in the colour that it has in the other picture
            axes.plot(*zip(*points, strict=True), marker="o", label=name, color=f"C{number}")
    axes.axhline(bound, color="gray", linestyle="--", label="the bound")
    axes.set(title="Poisson arrivals", xlabel="jobs a second", ylabel="P99 response time in seconds")
    axes.set(xlim=(0.0, None), ylim=(0.0, None))
    axes.legend()
