"""What starving for KV memory costs, when preempted sequences are computed again and when they are swapped.

    python benchmarks/preemption.py [--quick] [--json PATH]

The queue never runs dry: each request that ends is replaced by the next. With an endless pool all of those
in flight run, and the most blocks that they ever hold are the need. Then the pool is 38 % of that, for
two contenders that differ in nothing but the preemption mode: `recompute`, and `auto` with swap space for
the whole need. The watermark is 0 in both, so that admission does not keep out of trouble whom it could
let in: what is asked here is what trouble costs. Measured is a window behind a warm-up, so that neither
the first prompts nor the draining of the last requests count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from measure import Run, Series, benchmark_parser, print_series, report, timed
from rich.console import Console
from rich.table import Table
from static_batching import CountingRunner
from transformers import AutoTokenizer
from workload import Lengths, LogNormal, Piece, make_workload

from tidemill.params import SamplingParams
from tidemill_scheduler import (
    PreemptionMode,
    RestoreCosts,
    Scheduler,
    SchedulerConfig,
    SequenceId,
    StepPlan,
)
from tidemill_worker.app import rehearse
from tidemill_worker.engine import Engine, EngineStats, Runner
from tidemill_worker.generation import Generation
from tidemill_worker.model.architecture import vocabulary_size
from tidemill_worker.model.checkpoint import locate_embedded
from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.model.loader import LoadedModel, load_model
from tidemill_worker.model.runner import ModelRunner, StepTokens
from tidemill_worker.request import OpenChoice, Request
from tidemill_worker.settings import load_settings
from tidemill_worker.tokenizer import Tokenizer

SHARE = 0.38
"""Of the needed blocks, in the starved pool: 1600 of 4200, as in the report of vllm#54644."""
LENGTHS = Lengths(LogNormal(16, 0.3, (8, 32)), LogNormal(384, 0.5, (96, 768)))
"""Short prompts and long outputs: all are let in soon, and outgrow the memory together."""
BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 512


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        in_flight: requests at a time.
        warm_up: output tokens before the window.
        window: output tokens in it.
    """

    in_flight: int
    warm_up: int
    window: int


FULL = Extent(448, 200_000, 60_000)
"""The first requests are all young at once, so the warm-up goes on until each place has seen its second.
So many are in flight that the starved pool still fills a step: where it does not, what is measured is
the price of small steps, which no way of preempting can lower."""
QUICK = Extent(32, 5_000, 3_000)


@dataclass(frozen=True)
class Workload:
    """What is generated, and by whom."""

    extent: Extent
    pieces: Sequence[Piece]
    loaded: LoadedModel
    tokenizer: Tokenizer

    @property
    def endless_blocks(self) -> int:
        """Blocks that are enough for those in flight, whoever they are."""
        longest = LENGTHS.prompt.bounds[1] + LENGTHS.output.bounds[1]
        return self.extent.in_flight * -(-longest // BLOCK_SIZE)


@dataclass
class Contender:
    """A pool, a preemption mode, and what came of them in the last run's window."""

    name: str
    num_blocks: int
    num_swap_blocks: int = 0
    mode: PreemptionMode = PreemptionMode.RECOMPUTE
    peak_blocks: int = 0
    num_computed: int = 0
    before: EngineStats | None = None
    after: EngineStats | None = None
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """What was generated, by request, from the beginning."""
    ended: set[str] = field(default_factory=set)

    def run(self, work: Workload, runner: Runner) -> Run:
        """Warm up, then generate the window's tokens."""
        counting = CountingRunner(runner)
        engine = Engine(counting, Scheduler(self.config(work)), frozenset())
        self.tokens, self.ended, self.peak_blocks = {}, set(), 0
        following = iter(enumerate(work.pieces))
        for _ in range(work.extent.in_flight):
            self._add(engine, work, following)
        target = work.extent.warm_up
        self._go_on(engine, work, following, lambda stats: stats.generation_tokens >= target)
        self.before, num_before = engine.stats(), counting.num_tokens
        target = self.before.generation_tokens + work.extent.window
        with timed() as measured:
            self._go_on(engine, work, following, lambda stats: stats.generation_tokens >= target)
        self.after, self.num_computed = engine.stats(), counting.num_tokens - num_before
        return measured

    def since_warm_up(self, count: Callable[[EngineStats], int]) -> int:
        """How much a counter rose in the window."""
        assert self.before is not None
        assert self.after is not None
        return count(self.after) - count(self.before)

    @property
    def recomputed_share(self) -> float:
        """Of all tokens that were computed, those that had been computed before."""
        return self.since_warm_up(lambda stats: stats.recomputed_tokens) / self.num_computed

    def make_runner(self, work: Workload) -> ModelRunner:
        """New memory, and everything that is compiled or measured before the first job."""
        cpu = torch.device("cpu")
        spec = KVCacheSpec.for_layers(work.loaded.layers, block_size=BLOCK_SIZE, dtype=torch.float32)
        runner = ModelRunner(
            work.loaded.model,
            spec.allocate(self.num_blocks, cpu),
            spec.allocate_swap_space(self.num_swap_blocks, cpu),
        )
        rehearse(Engine(runner, Scheduler(self.config(work)), frozenset()), work.tokenizer)
        if self.num_swap_blocks:
            runner.measure_costs(MAX_NUM_BATCHED_TOKENS)
        return runner

    def config(self, work: Workload) -> SchedulerConfig:
        return SchedulerConfig(
            num_blocks=self.num_blocks,
            num_swap_blocks=self.num_swap_blocks,
            preemption_mode=self.mode,
            max_model_len=1024,
            block_size=BLOCK_SIZE,
            max_num_seqs=work.extent.in_flight,
            max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, work.extent.in_flight),
            enable_prefix_caching=False,
            watermark=0.0,
        )

    def _add(self, engine: Engine, work: Workload, following: Iterator[tuple[int, Piece]]) -> None:
        index, piece = next(following)
        params = SamplingParams(max_tokens=piece.num_output, temperature=0.0, ignore_eos=True)
        choice = OpenChoice(0, work.tokenizer.output_text(params, piece.token_ids))
        engine.add(Request(str(index), piece.token_ids, params, seed=0, choices=[choice]))
        self.tokens[str(index)] = []

    def _go_on(
        self,
        engine: Engine,
        work: Workload,
        following: Iterator[tuple[int, Piece]],
        is_over: Callable[[EngineStats], bool],
    ) -> None:
        while not is_over(stats := engine.stats()):
            self.peak_blocks = max(self.peak_blocks, round(stats.kv_usage * self.num_blocks))
            for output in engine.step():
                self.tokens[output.request_id].extend(output.token_ids)
                if output.finished:
                    self.ended.add(output.request_id)
                    self._add(engine, work, following)


class NoModel:
    """Draws the same token for everyone: enough to see how many blocks a workload needs."""

    costs = RestoreCosts()

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> StepTokens:
        return StepTokens({row.sequence: 0 for row in plan.rows if row.sample}, {}, {})


def main() -> None:
    arguments = benchmark_parser(
        __doc__, quick=f"{QUICK.in_flight} requests in flight, not {FULL.in_flight}"
    ).parse_args()
    extent = QUICK if arguments.quick else FULL
    work = load_workload(extent)
    endless = Contender("endless", work.endless_blocks)
    endless.run(work, NoModel())
    needed = endless.peak_blocks
    starved = round(SHARE * needed)
    print(f"{extent.in_flight} requests in flight need {needed} blocks; the starved pool has {starved}")
    contenders = [
        endless,
        Contender("auto", starved, num_swap_blocks=needed, mode=PreemptionMode.AUTO),
        Contender("recompute", starved),
    ]
    series = [run_once(contender, work) for contender in contenders]
    print_series("output tokens per second", series)
    print_preemptions(contenders)
    settings = {"in_flight": extent.in_flight, "window": extent.window, "quick": arguments.quick}
    settings |= {"blocks_needed": needed, "blocks": starved}
    report(figures_of(contenders, series), settings=settings, path=arguments.json)


def load_workload(extent: Extent) -> Workload:
    """Pieces are drawn until the window is full even if every output were the shortest."""
    folder = locate_embedded(load_settings().cache_dir)
    loaded = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = Tokenizer.from_pretrained(folder, vocab_size=vocabulary_size(loaded.model))
    shortest = LENGTHS.output.bounds[0]
    count = extent.in_flight + -(-(extent.warm_up + extent.window) // shortest)
    pieces = make_workload(AutoTokenizer.from_pretrained(folder), count, lengths=LENGTHS)
    return Workload(extent, pieces, loaded, tokenizer)


def run_once(contender: Contender, work: Workload) -> Series:
    run = contender.run(work, contender.make_runner(work))
    tokens = contender.since_warm_up(lambda stats: stats.generation_tokens)
    print(f"  {contender.name}: {tokens / run.seconds:.1f} tokens/s", flush=True)
    return Series(contender.name, tokens, [run])


def print_preemptions(contenders: Sequence[Contender]) -> None:
    """A table for people, of the window."""
    table = Table(title="preemptions")
    for column in ("contender", "blocks", "victims", "recomputed", "share", "out", "in"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for one in contenders:
        counts: tuple[Callable[[EngineStats], int], ...] = (
            lambda stats: stats.num_preemptions,
            lambda stats: stats.recomputed_tokens,
            lambda stats: stats.blocks_swapped_out,
            lambda stats: stats.blocks_swapped_in,
        )
        victims, recomputed, out, back = (str(one.since_warm_up(count)) for count in counts)
        share = f"{one.recomputed_share:.1%}"
        table.add_row(one.name, str(one.num_blocks), victims, recomputed, share, out, back)
    Console().print(table)


def figures_of(contenders: Sequence[Contender], series: Sequence[Series]) -> dict[str, float]:
    endless, auto, recompute = contenders
    rates = {one.name: one.rate for one in series}
    common = endless.ended & auto.ended & recompute.ended
    return {
        "recomputed_share_recompute": recompute.recomputed_share,
        "recomputed_share_auto": auto.recomputed_share,
        "tokens_ratio": rates["auto"] / rates["endless"],
        "tokens_ratio_recompute": rates["recompute"] / rates["endless"],
        "tokens_identical": float(
            all(endless.tokens[one] == auto.tokens[one] == recompute.tokens[one] for one in common)
        ),
        "requests_compared": len(common),
    }


if __name__ == "__main__":
    main()
