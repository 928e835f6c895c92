"""Continuous against static batching, through the queue: a burst of jobs, then Poisson arrivals.

    python benchmarks/batching.py [--quick] [--json PATH] [--plot PATH]

All contenders run on the same model, kernels and queue, in the same worker process; only how they make
up batches differs (`static_batching.py`). Static batching gets the best of several batch sizes, found on
a part of the burst. Lengths are log-normal with a long tail, end of text is ignored, decoding is greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batching_plot import plot_batching
from batching_worker import SETTINGS, Batching, BatchingWorker, Kind, running_worker
from measure import benchmark_parser, commit, machine, report, timed
from response_times import Offered, offer, poisson_arrivals, sustained_load
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from workload import CHAT, Piece, make_workload

from tidemill import Job, SamplingParams
from tidemill.client import Client
from tidemill_worker.embedded import embedded_valkey
from tidemill_worker.model.checkpoint import locate_embedded
from tidemill_worker.settings import load_settings

CONTINUOUS = Batching(Kind.CONTINUOUS, 64)
STATIC = (Kind.SHRINKING, Kind.PACKED, Kind.PADDED)
OFFERED_LOADS = (Kind.CONTINUOUS, Kind.PACKED, Kind.PADDED)
"""Contenders that jobs arrive at over time; the others have the burst only."""
BOUND = 2.0
"""On the P99 response time, in those of the unloaded queue: there, a job of the 99th percentile runs alone
on any contender. Twice that leaves static batching, where a job may wait for one whole batch before its
own begins, a load to sustain."""


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        jobs: of the burst.
        tuning_jobs: of them, the first, that batch sizes are compared on.
        sizes: of static batches, for each kind.
        seconds: how long jobs arrive one by one at each load: long enough that a queue which grows is seen.
        loads: shares of what each contender made of the burst, in jobs a second. It may sustain more than
            all of it: the burst ends with a few long jobs that leave places empty.
    """

    jobs: int
    tuning_jobs: int
    sizes: Mapping[Kind, Sequence[int]]
    seconds: float
    loads: Sequence[float]


FULL = Extent(
    160,
    48,
    {Kind.SHRINKING: (32, 64), Kind.PACKED: (16, 32, 64), Kind.PADDED: (4, 8, 16)},
    30.0,
    (0.5, 0.75, 1.0, 1.25, 1.5),
)
QUICK = Extent(48, 48, {Kind.SHRINKING: (32,), Kind.PACKED: (16,), Kind.PADDED: (16,)}, 5.0, (1.0,))


@dataclass
class Contender:
    """A way of batching, and what came of it."""

    batching: Batching
    burst: Offered
    useful: float
    """Of the tokens that the model computed for the burst, the share that the jobs needed."""
    loads: list[tuple[float, float]] = field(default_factory=list)
    """(jobs a second, P99 response time in seconds), the unloaded queue first; empty if none was offered."""


def main() -> None:
    arguments = parse_arguments()
    extent = QUICK if arguments.quick else FULL
    settings = load_settings(SETTINGS)
    encoding = AutoTokenizer.from_pretrained(locate_embedded(settings.cache_dir))
    pieces = make_workload(encoding, extent.jobs, lengths=CHAT)
    with (
        tempfile.TemporaryDirectory() as folder,
        embedded_valkey(Path(folder) / "queue") as url,
        running_worker(url) as worker,
    ):
        bench = Bench(worker, url, settings.queue_name)
        contenders = {kind: bench.burst(bench.best(kind, pieces, extent), pieces) for kind in Kind}
        fastest = max(contender.burst.jobs_per_second for contender in contenders.values())
        most = math.ceil(fastest * extent.loads[-1] * extent.seconds)
        arriving = make_workload(encoding, most, seed=1, lengths=CHAT)
        unloaded = bench.unloaded(arriving)
        for kind in OFFERED_LOADS:
            bench.load(contenders[kind], unloaded, arriving, extent)
    bound = BOUND * unloaded
    print_contenders(contenders, bound)
    figures = figures_of(contenders, bound)
    settings_used = {**SETTINGS, "jobs": extent.jobs, "load_s": extent.seconds, "quick": arguments.quick}
    settings_used |= {kind.value: contender.batching.size for kind, contender in contenders.items()}
    report(figures, settings=settings_used, path=arguments.json)
    if arguments.plot:
        plot(arguments.plot, contenders, bound)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, quick=f"{QUICK.jobs} jobs instead of {FULL.jobs}")
    parser.add_argument("--plot", type=Path, help="draw response times here, as SVG")
    return parser.parse_args()


@dataclass(frozen=True)
class Bench:
    """A worker, and the queue that it serves."""

    worker: BatchingWorker
    url: str
    queue: str

    def best(self, kind: Kind, pieces: Sequence[Piece], extent: Extent) -> Batching:
        """The size of static batches with the most tokens a second; continuous batching has its own."""
        if kind is Kind.CONTINUOUS:
            return CONTINUOUS
        sizes = [Batching(kind, size) for size in extent.sizes[kind]]
        if len(sizes) == 1:
            return sizes[0]
        tried = [self.burst(batching, pieces[: extent.tuning_jobs]) for batching in sizes]
        return max(tried, key=lambda contender: contender.burst.tokens_per_second).batching

    def burst(self, batching: Batching, pieces: Sequence[Piece]) -> Contender:
        """Submit all jobs at once."""
        with timed() as run, self.worker.serving(batching) as served:
            warm_up = self._offer([Piece("The", (), 4)], [0.0])
            burst = self._offer(pieces, [0.0] * len(pieces))
        num_useful = warm_up.num_useful_tokens + burst.num_useful_tokens
        speed, foreign = f"{burst.tokens_per_second:.1f} tokens/s", f"{run.foreign:.0%} foreign CPU"
        print(f"  {batching}: {len(pieces)} jobs at {speed}, {foreign}", flush=True)
        return Contender(batching, burst, num_useful / served.num_computed_tokens)

    def unloaded(self, pieces: Sequence[Piece]) -> float:
        """Response time, in seconds, of a job whose output is as long as 99 % of them, alone."""
        by_length = sorted(pieces, key=lambda piece: piece.num_output)
        with self.worker.serving(CONTINUOUS):
            alone = [by_length[len(pieces) * 99 // 100]]
            return statistics.median(self._offer(alone, [0.0]).p99 for _ in range(3))

    def load(self, contender: Contender, unloaded: float, pieces: Sequence[Piece], extent: Extent) -> None:
        """Offer each load until one passes the bound; the first of the same jobs, in the same pattern."""
        contender.loads.append((0.0, unloaded))
        for share in extent.loads:
            if contender.loads[-1][1] > BOUND * unloaded:
                break
            rate = share * contender.burst.jobs_per_second
            arrivals = poisson_arrivals(rate, math.ceil(rate * extent.seconds))
            with self.worker.serving(contender.batching):
                offered = self._offer(pieces[: len(arrivals)], arrivals)
            contender.loads.append((rate, offered.p99))
            what = f"{len(arrivals)} jobs at {rate:.2f}/s"
            print(f"  {contender.batching}: {what}, P99 {offered.p99:.1f} s", flush=True)

    def _offer(self, pieces: Sequence[Piece], arrivals: Sequence[float]) -> Offered:
        return asyncio.run(self._offer_jobs([job_of(piece) for piece in pieces], arrivals))

    async def _offer_jobs(self, jobs: Sequence[Job], arrivals: Sequence[float]) -> Offered:
        async with Client(self.url, queue=self.queue) as client:
            return await offer(client, jobs, arrivals)


def job_of(piece: Piece) -> Job:
    params = SamplingParams(max_tokens=piece.num_output, temperature=0.0, ignore_eos=True)
    return Job(prompt=piece.prompt, params=params)


def figures_of(contenders: Mapping[Kind, Contender], bound: float) -> dict[str, float]:
    """All ratios are of continuous batching over static, padded unless the name says another."""
    ours, shrinking, packed, padded = (contenders[kind] for kind in Kind)
    load = sustained_load(ours.loads, bound)
    return {
        "tokens_ratio": ours.burst.tokens_per_second / padded.burst.tokens_per_second,
        "tokens_ratio_packed": ours.burst.tokens_per_second / packed.burst.tokens_per_second,
        "tokens_ratio_shrinking": ours.burst.tokens_per_second / shrinking.burst.tokens_per_second,
        "p99_ratio": ours.burst.p99 / padded.burst.p99,
        "p99_ratio_packed": ours.burst.p99 / packed.burst.p99,
        "p99_ratio_shrinking": ours.burst.p99 / shrinking.burst.p99,
        "mean_ratio": ours.burst.mean / padded.burst.mean,
        "mean_ratio_packed": ours.burst.mean / packed.burst.mean,
        "mean_ratio_shrinking": ours.burst.mean / shrinking.burst.mean,
        "useful_continuous": ours.useful,
        "useful_shrinking": shrinking.useful,
        "useful_packed": packed.useful,
        "useful_static": padded.useful,
        "load_ratio": load / sustained_load(padded.loads, bound),
        "load_ratio_packed": load / sustained_load(packed.loads, bound),
        "p99_bound_s": bound,
        "continuous_tokens_per_s": ours.burst.tokens_per_second,
    }


def print_contenders(contenders: Mapping[Kind, Contender], bound: float) -> None:
    """A table for people; in brackets, the change from padded static batching."""
    table = Table(title=f"a burst, and the load at which the P99 response time is {bound:.1f} s")
    table.add_column("batching", no_wrap=True)
    for column in ("tokens/s", "useful", "mean, s", "P99, s", "jobs/s"):
        table.add_column(column, justify="right")
    padded = contenders[Kind.PADDED].burst
    for contender in contenders.values():
        burst = contender.burst
        table.add_row(
            str(contender.batching),
            f"{burst.tokens_per_second:.1f}",
            f"{contender.useful:.1%}",
            f"{burst.mean:.1f} ({burst.mean / padded.mean - 1:+.0%})",
            f"{burst.p99:.1f} ({burst.p99 / padded.p99 - 1:+.0%})",
            f"{sustained_load(contender.loads, bound):.2f}" if contender.loads else "-",
        )
    Console().print(table)


def plot(path: Path, contenders: Mapping[Kind, Contender], bound: float) -> None:
    about = machine()
    named = {str(contender.batching): contender for contender in contenders.values()}
    plot_batching(
        path,
        bursts={name: contender.burst.response_times for name, contender in named.items()},
        loads={name: contender.loads for name, contender in named.items()},
        bound=bound,
        caption=f"SmolLM2-135M on {about['cores']} cores of {about['cpu']} ({about['simd']}), {commit()}",
    )


if __name__ == "__main__":
    main()
