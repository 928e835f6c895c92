"""What starving for KV memory costs, when preempted sequences are computed again and when they are swapped.

    python benchmarks/preemption.py [--quick] [--json PATH]

All requests are there at once and all may run at once. With an endless pool they do, and the most
blocks that are in use at any time are the need. Then the pool is 38 % of that, for two contenders that
differ in nothing but the preemption mode: `recompute`, and `auto` with swap space for the whole
need. The watermark is 0 in both, so that admission does not keep out of trouble whom it could let in:
what is asked here is what trouble costs. The contenders take turns, forwards and backwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measure import Series, print_series, report, timed
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from workload import Lengths, LogNormal, Piece, make_workload

from tidemill.params import SamplingParams
from tidemill_scheduler import PreemptionMode, Scheduler, SchedulerConfig
from tidemill_worker.app import rehearse
from tidemill_worker.engine import Engine
from tidemill_worker.model.architecture import vocabulary_size
from tidemill_worker.model.checkpoint import locate_embedded
from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.model.loader import LoadedModel, load_model
from tidemill_worker.model.runner import ModelRunner
from tidemill_worker.request import OpenChoice, Request
from tidemill_worker.settings import load_settings
from tidemill_worker.tokenizer import Tokenizer

SHARE = 0.38
"""Of the needed blocks, in the starved pool: 1600 of 4200, as in the report of vllm#54644."""
LENGTHS = Lengths(LogNormal(20, 0.3, (16, 48)), LogNormal(160, 0.5, (48, 384)))
"""Short prompts and long outputs: all are let in soon, and outgrow the memory together."""
BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 512


@dataclass(frozen=True)
class Workload:
    """What is generated, and by whom."""

    pieces: Sequence[Piece]
    loaded: LoadedModel
    tokenizer: Tokenizer

    @property
    def num_output(self) -> int:
        return sum(piece.num_output for piece in self.pieces)

    @property
    def num_computed(self) -> int:
        """Tokens that have to be computed once; the last one of each output need not be."""
        return sum(len(piece.token_ids) + piece.num_output - 1 for piece in self.pieces)

    @property
    def endless_blocks(self) -> int:
        """Blocks that are enough for all of them at once."""
        return sum(-(-(len(piece.token_ids) + piece.num_output) // BLOCK_SIZE) for piece in self.pieces)


@dataclass
class Contender:
    """A pool, a preemption mode, and what came of them."""

    name: str
    num_blocks: int
    num_swap_blocks: int = 0
    mode: PreemptionMode = PreemptionMode.RECOMPUTE
    peak_blocks: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    swapped: tuple[int, int] = (0, 0)
    """Blocks out and in."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """What was generated, by request."""

    def run(self, work: Workload) -> None:
        """Generate everything; memory and engine are new each time."""
        engine = self._make_engine(work)
        self.tokens = {str(index): [] for index in range(len(work.pieces))}
        for index, piece in enumerate(work.pieces):
            params = SamplingParams(max_tokens=piece.num_output, temperature=0.0, ignore_eos=True)
            choice = OpenChoice(0, work.tokenizer.output_text(params, piece.token_ids))
            engine.add(Request(str(index), piece.token_ids, params, seed=0, choices=[choice]))
        while engine.has_unfinished:
            for output in engine.step():
                self.tokens[output.request_id].extend(output.token_ids)
            self.peak_blocks = max(self.peak_blocks, round(engine.stats().kv_usage * self.num_blocks))
        stats = engine.stats()
        self.num_preemptions, self.num_recomputed = stats.num_preemptions, stats.recomputed_tokens
        self.swapped = (stats.blocks_swapped_out, stats.blocks_swapped_in)

    def recomputed_share(self, work: Workload) -> float:
        """Of all tokens that were computed, those that had been computed before."""
        return self.num_recomputed / (work.num_computed + self.num_recomputed)

    def _make_engine(self, work: Workload) -> Engine:
        cpu = torch.device("cpu")
        spec = KVCacheSpec.for_layers(work.loaded.layers, block_size=BLOCK_SIZE, dtype=torch.float32)
        runner = ModelRunner(
            work.loaded.model,
            spec.allocate(self.num_blocks, cpu),
            spec.allocate_swap_space(self.num_swap_blocks, cpu),
        )
        config = SchedulerConfig(
            num_blocks=self.num_blocks,
            num_swap_blocks=self.num_swap_blocks,
            preemption_mode=self.mode,
            max_model_len=2048,
            block_size=BLOCK_SIZE,
            max_num_seqs=len(work.pieces),
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enable_prefix_caching=False,
            watermark=0.0,
        )
        rehearse(Engine(runner, Scheduler(config), frozenset()), work.tokenizer)
        if self.num_swap_blocks:
            runner.measure_costs(MAX_NUM_BATCHED_TOKENS)
        return Engine(runner, Scheduler(config), frozenset())


def main() -> None:
    arguments = parse_arguments()
    work = load_workload(48 if arguments.quick else 192)
    print(
        f"{len(work.pieces)} requests, {work.num_computed} tokens to compute, {work.num_output} output tokens"
    )
    endless = Contender("endless", work.endless_blocks)
    endless.run(work)  # warms up, and says what is needed
    starved = round(SHARE * endless.peak_blocks)
    contenders = [
        endless,
        Contender("recompute", starved),
        Contender("auto", starved, num_swap_blocks=endless.peak_blocks, mode=PreemptionMode.AUTO),
    ]
    series = take_turns(contenders, work, rounds=1 if arguments.quick else 2)
    print_series("output tokens per second", list(series.values()))
    print_preemptions(contenders, work)
    figures = figures_of(contenders, series, work)
    settings = {"requests": len(work.pieces), "quick": arguments.quick, "blocks_needed": endless.peak_blocks}
    report(figures, settings={**settings, "blocks": starved}, path=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="48 requests instead of 192, one round")
    parser.add_argument("--json", type=Path, help="write commit, machine, settings and figures here")
    return parser.parse_args()


def load_workload(count: int) -> Workload:
    folder = locate_embedded(load_settings().cache_dir)
    loaded = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = Tokenizer.from_pretrained(folder, vocab_size=vocabulary_size(loaded.model))
    pieces = make_workload(AutoTokenizer.from_pretrained(folder), count, lengths=LENGTHS)
    return Workload(pieces, loaded, tokenizer)


def take_turns(contenders: Sequence[Contender], work: Workload, *, rounds: int) -> dict[str, Series]:
    """Run them forwards and backwards in turn."""
    series = {contender.name: Series(contender.name, work.num_output) for contender in contenders}
    for turn in range(rounds):
        for contender in contenders if turn % 2 == 0 else reversed(contenders):
            with timed() as measured:
                contender.run(work)
            series[contender.name].runs.append(measured)
            print(f"  {contender.name}: {work.num_output / measured.seconds:.1f} tokens/s", flush=True)
    return series


def print_preemptions(contenders: Sequence[Contender], work: Workload) -> None:
    table = Table(title="preemptions")
    for column in ("contender", "blocks", "preemptions", "recomputed", "share", "swapped out", "swapped in"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for one in contenders:
        share, (out, back) = one.recomputed_share(work), one.swapped
        numbers = (one.num_blocks, one.num_preemptions, one.num_recomputed)
        table.add_row(one.name, *map(str, numbers), f"{share:.1%}", str(out), str(back))
    Console().print(table)


def figures_of(
    contenders: Sequence[Contender], series: dict[str, Series], work: Workload
) -> dict[str, float]:
    endless, recompute, auto = contenders
    return {
        "recomputed_share_recompute": recompute.recomputed_share(work),
        "recomputed_share_auto": auto.recomputed_share(work),
        "tokens_ratio": series["auto"].rate / series["endless"].rate,
        "tokens_ratio_recompute": series["recompute"].rate / series["endless"].rate,
        "tokens_identical": float(endless.tokens == recompute.tokens == auto.tokens),
    }


if __name__ == "__main__":
    main()
