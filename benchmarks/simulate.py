"""The scheduler simulated: a trace of requests, a model and a GPU, and no GPU needed.

    python benchmarks/simulate.py [--gpu h100] [--model llama-3.1-8b] [--requests 1000] [--plot PATH]
    python benchmarks/simulate.py --trace requests.jsonl
    python benchmarks/simulate.py --sweep [--gpu h100] [--model qwen2.5-0.5b] [--plot PATH]

The real scheduler plans every step; how long a step takes, a roofline says. A trace in a file has a
line {"arrival": seconds, "prompt_tokens": n, "output_tokens": n} a request, and where they matter
"priority" (0 to 2), "tenant", and "prefix": {"group": name, "tokens": n} for a beginning that all
prompts of a group share. Without one, lengths are drawn from log-normal distributions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from measure import report
from model_shape import load_shape
from pressure import NUM_REQUESTS, draw_pressure, plot_sweep, print_sweep, sweep, sweep_figures
from request_trace import MAX_TOKENS, TracedRequest, draw_trace, read_trace
from roofline import ACCELERATORS, Efficiency, Roofline
from simulation_report import figures_of, plot_simulation
from simulator import Simulation, Simulator
from workload import LogNormal

from tidemill_scheduler import PreemptionMode, SchedulerConfig

GIB = 1 << 30
SWEEP_SEQS = 512
"""So that all requests of the sweep run together if memory allows."""
OF_A_TRACE = (
    *("quick", "trace", "requests", "arrivals", "rate"),
    *("prompt_median", "prompt_sigma", "prompt_most", "output_median", "output_sigma", "output_most"),
    *("num_blocks", "gpu_memory_utilization", "max_num_seqs", "preemption_mode"),
)
"""Options of which the sweep makes no use: it has its own."""


def main(words: Sequence[str] | None = None) -> None:
    """Run what the command line asks for; what it gets wrong ends it with one line."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    if arguments.sweep:
        refuse_given(parser, words, OF_A_TRACE)
    try:
        figures = run_sweep(arguments) if arguments.sweep else run_trace(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()
    }
    report(figures, settings=settings, path=arguments.json)


def run_trace(arguments: argparse.Namespace) -> dict[str, float]:
    """Simulate one trace, and say how it went."""
    roofline = make_roofline(arguments)
    config, trace = make_config(arguments, roofline), make_trace(arguments)
    start = time.perf_counter()
    simulation = Simulator(config, roofline, trace).run()
    seconds = time.perf_counter() - start
    print_refused(simulation)
    print(f"{describe(arguments)}, {config.num_blocks} blocks of KV memory; simulated in {seconds:.1f} s")
    if arguments.plot:
        plot_simulation(simulation, arguments.plot, title=describe(arguments))
    return figures_of(simulation)


def run_sweep(arguments: argparse.Namespace) -> dict[str, float]:
    """Simulate the sweep under memory pressure."""
    arguments.max_num_seqs = SWEEP_SEQS
    roofline = make_roofline(arguments)
    result = sweep(make_config(arguments, roofline), roofline, draw_pressure(seed=arguments.seed))
    print(f"{NUM_REQUESTS} requests at once, {describe(arguments)}")
    print_sweep(result)
    if arguments.plot:
        plot_sweep(result, arguments.plot, title=f"{NUM_REQUESTS} requests at once, {describe(arguments)}")
    return sweep_figures(result)


def make_parser() -> argparse.ArgumentParser:
    """Names and meanings are the worker's where it has such a flag."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tenth of the requests drawn")
    add("--json", type=Path, help="write commit, machine, settings and figures here")
    add("--plot", type=Path, help="draw memory, sequences and response times here (.svg, .png)")
    add("--sweep", action="store_true", help="pools of 1600, 800 and 400 of 4200 blocks instead of a trace")
    _add_hardware(parser)
    _add_trace(parser)
    _add_scheduler(parser)
    return parser


def refuse_given(
    parser: argparse.ArgumentParser, words: Sequence[str] | None, names: Collection[str]
) -> None:
    """End with one line if any of these options is given, be it with the value that it has without."""
    absent = object()  # argparse sets defaults only where there is nothing yet
    given = parser.parse_args(words, argparse.Namespace(**dict.fromkeys(names, absent)))
    for name in names:
        if getattr(given, name) is not absent:
            parser.error(f"--sweep makes no use of --{name.replace('_', '-')}")


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    add, assumed = parser.add_argument_group("model and GPU").add_argument, Efficiency()
    add("--model", default="qwen2.5-0.5b", help="qwen2.5-0.5b, llama-3.1-8b, or a config.json or its folder")
    add("--gpu", choices=ACCELERATORS, default="h100")
    add(
        "--bandwidth-efficiency",
        type=float,
        default=assumed.bandwidth,
        help="%(default)s of the data sheet's",
    )
    add("--compute-efficiency", type=float, default=assumed.rate, help="%(default)s of the data sheet's")
    add("--link-efficiency", type=float, default=assumed.link, help="%(default)s of the data sheet's")
    add("--step-overhead", type=float, default=assumed.step_overhead, help="%(default)s seconds of each step")


def _add_trace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("trace").add_argument
    add("--trace", type=Path, help="a file of one JSON object a line")
    add("--requests", type=int, default=1000)
    add("--arrivals", choices=("burst", "poisson"), default="burst")
    add("--rate", type=float, default=20.0, help="requests per second of poisson")
    add("--seed", type=int, default=0)
    for name, median, sigma, most in (("prompt", 256.0, 1.0, 8192), ("output", 128.0, 1.0, 2048)):
        add(f"--{name}-median", type=float, default=median, help="tokens, %(default)s")
        add(f"--{name}-sigma", type=float, default=sigma, help="of the log-normal, %(default)s")
        add(f"--{name}-most", type=int, default=most, help="tokens, %(default)s")


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("scheduler").add_argument
    add("--block-size", type=int, default=16)
    add("--num-blocks", type=int, help="of KV memory; else what fits the GPU")
    add("--gpu-memory-utilization", type=float, default=0.9)
    add("--max-model-len", type=int, help="tokens; else the model's")
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=2048)
    add("--max-prefill-chunk", type=int, default=512)
    add("--swap-space", type=float, default=4.0, help="GiB of CPU memory")
    add("--preemption-mode", type=PreemptionMode, choices=PreemptionMode, default=PreemptionMode.AUTO)
    add("--watermark", type=float, default=0.01)
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)


def make_roofline(arguments: argparse.Namespace) -> Roofline:
    if arguments.block_size < 1:
        raise ValueError(f"block_size is {arguments.block_size}, must be at least 1")
    efficiency = Efficiency(
        bandwidth=arguments.bandwidth_efficiency,
        rate=arguments.compute_efficiency,
        link=arguments.link_efficiency,
        step_overhead=arguments.step_overhead,
    )
    return Roofline(
        load_shape(arguments.model), ACCELERATORS[arguments.gpu], efficiency, arguments.block_size
    )


def make_config(arguments: argparse.Namespace, roofline: Roofline) -> SchedulerConfig:
    if arguments.swap_space < 0.0:
        raise ValueError(f"swap_space is {arguments.swap_space}, must be at least 0 GiB")
    fits = arguments.num_blocks is None
    return SchedulerConfig(
        num_blocks=roofline.blocks_in(arguments.gpu_memory_utilization) if fits else arguments.num_blocks,
        max_model_len=roofline.model.max_model_len
        if arguments.max_model_len is None
        else arguments.max_model_len,
        block_size=arguments.block_size,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_prefill_chunk=arguments.max_prefill_chunk,
        num_swap_blocks=int(arguments.swap_space * GIB // roofline.block_bytes),
        preemption_mode=arguments.preemption_mode,
        watermark=arguments.watermark,
        enable_prefix_caching=arguments.enable_prefix_caching,
    )


def make_trace(arguments: argparse.Namespace) -> list[TracedRequest]:
    if arguments.trace is not None:
        return read_trace(arguments.trace)
    if arguments.requests < 0:
        raise ValueError(f"requests is {arguments.requests}, must be at least 0")
    return draw_trace(
        arguments.requests // 10 if arguments.quick else arguments.requests,
        prompts=_lengths(arguments.prompt_median, arguments.prompt_sigma, arguments.prompt_most),
        outputs=_lengths(arguments.output_median, arguments.output_sigma, arguments.output_most),
        arrivals=arguments.arrivals,
        rate=arguments.rate,
        seed=arguments.seed,
    )


def _lengths(median: float, sigma: float, most: int) -> LogNormal:
    if not 1 <= most <= MAX_TOKENS:
        raise ValueError(f"most tokens of a prompt or output are {most}, must be 1 to {MAX_TOKENS}")
    return LogNormal(median, sigma, (min(8, most), most))


def describe(arguments: argparse.Namespace) -> str:
    return f"{arguments.model} on {ACCELERATORS[arguments.gpu].name}"


def print_refused(simulation: Simulation) -> None:
    for request, error in simulation.refused:
        lengths = f"{request.prompt_tokens} + {request.output_tokens} tokens"
        print(f"refused: {lengths} at {request.arrival} s: {error}")


if __name__ == "__main__":
    main()
