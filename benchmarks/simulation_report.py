"""A simulation in figures, and in pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from simulator import Simulation


def figures_of(simulation: Simulation) -> dict[str, float]:
    """Figures by name; those of latency are missing if no response had a token, or a second one."""
    scheduler, history = simulation.scheduler, simulation.history
    num_swapped = scheduler.counters.num_swap_preemptions
    return {
        "requests": len(simulation.responses),
        "refused": len(simulation.refused),
        "steps": len(history.times),
        "makespan_s": makespan(simulation),
        "tokens_per_s": tokens_per_second(simulation),
        **_latencies("ttft", "ms", [1e3 * each.time_to_first_token for each in simulation.responses]),
        **_latencies("response", "s", [each.response_time for each in simulation.responses]),
        **_latencies("inter_token", "ms", [1e3 * gap for gap in simulation.gaps]),
        "preemptions_swap": num_swapped,
        "preemptions_recompute": scheduler.counters.num_preemptions - num_swapped,
        "recomputed_share": recomputed_share(simulation),
        "blocks_swapped_out": scheduler.counters.num_blocks_swapped_out,
        "blocks_swapped_in": scheduler.counters.num_blocks_swapped_in,
        "prefix_hit_share": scheduler.counters.num_prefix_hit_tokens
        / max(1, scheduler.counters.num_prefix_query_tokens),
        "kv_usage_mean": _mean_over_time(simulation),
        "kv_usage_peak": max(history.kv_usage, default=0.0),
    }


def makespan(simulation: Simulation) -> float:
    """Seconds from the first arrival to the last token."""
    if not simulation.responses:
        return 0.0
    last = max(response.last_token for response in simulation.responses)
    return last - simulation.responses[0].request.arrival


def tokens_per_second(simulation: Simulation) -> float:
    """Generated tokens over the makespan."""
    seconds = makespan(simulation)
    return simulation.num_output_tokens / seconds if seconds else 0.0


def recomputed_share(simulation: Simulation) -> float:
    """Of all tokens that were computed, those computed once more because a preemption lost them."""
    return simulation.scheduler.counters.num_recomputed_tokens / max(1, simulation.num_computed_tokens)


def peak_blocks(simulation: Simulation) -> int:
    """The most blocks that were in use at once."""
    return round(max(simulation.history.kv_usage, default=0.0) * simulation.scheduler.config.num_blocks)


def _latencies(name: str, unit: str, times: Sequence[float]) -> dict[str, float]:
    if not times:
        return {}
    p50, p99 = np.percentile(times, (50, 99))
    values = {"mean": np.mean(times), "p50": p50, "p99": p99}
    return {f"{name}_{which}_{unit}": float(value) for which, value in values.items()}


def _mean_over_time(simulation: Simulation) -> float:
    """KV usage, each step weighted by its length; idle time between steps does not count."""
    history = simulation.history
    return float(np.average(history.kv_usage, weights=history.seconds)) if history.times else 0.0


def plot_simulation(simulation: Simulation, path: Path, *, title: str) -> None:
    """Draw KV usage and sequences over time, and how response times are distributed.

    The format is that of the suffix of `path`: SVG, PNG or PDF.
    """
    figure = Figure(figsize=(7.0, 8.5), layout="constrained")
    memory, sequences, responses = figure.subplots(3)
    figure.suptitle(title)
    _plot_memory(memory, simulation)
    _plot_sequences(sequences, simulation)
    _plot_responses(responses, simulation)
    figure.savefig(path)


def _plot_memory(axes: Axes, simulation: Simulation) -> None:
    history = simulation.history
    axes.plot(history.times, history.kv_usage, label="KV memory")
    if simulation.scheduler.config.num_swap_blocks:
        axes.plot(history.times, history.swap_usage, label="swap space, to be needed again")
    axes.set(xlabel="seconds", ylabel="share in use", ylim=(0.0, 1.02))
    axes.legend()


def _plot_sequences(axes: Axes, simulation: Simulation) -> None:
    history = simulation.history
    axes.plot(history.times, history.running, label="running")
    axes.plot(history.times, history.waiting, label="waiting")
    axes.set(xlabel="seconds", ylabel="sequences")
    axes.legend()


def _plot_responses(axes: Axes, simulation: Simulation) -> None:
    if simulation.responses:
        axes.ecdf([response.response_time for response in simulation.responses], label="to the last token")
        axes.ecdf([response.time_to_first_token for response in simulation.responses], label="to the first")
        axes.legend()
    axes.set(xlabel="seconds from arrival", ylabel="share of requests")
