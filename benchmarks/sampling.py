"""What choosing 64 tokens costs, beside the decode step that the logits come from.

    python benchmarks/sampling.py [--quick] [--json PATH]

64 requests decode together on SmolLM2 in float32. After each step, its logits are sampled once
more for each kind of parameters, the kinds in turn, so that all see the same logits and the same
machine. The step is the model's forward alone: building the batch, and sampling, do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from measure import benchmark_parser, report, timed
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from workload import FLAGS, make_workload

from tidemill import SamplingParams
from tidemill_worker.app import ServedModel, build_model
from tidemill_worker.model.batch import PagedBatch
from tidemill_worker.model.checkpoint import locate_embedded
from tidemill_worker.model.runner import ModelRunner
from tidemill_worker.model.sampler import Sampler
from tidemill_worker.request import OpenChoice, Request
from tidemill_worker.settings import load_settings

ROWS = 64
PROMPT_TOKENS = 300
OUTPUT_TOKENS = 60
"""Known to the penalties besides the prompt, at the first round."""

MIXED: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.05, "logprobs": 5},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_tokens": 200},
    {"temperature": 1.0, "top_p": 0.95, "logit_bias": {token: -5.0 for token in range(100)}},
)
"""One row after the other; every fourth of them also has a grammar, and every fifth bad words."""


@dataclass
class Drawn:
    """A generation as the sampler sees it; each round appends a token."""

    params: SamplingParams
    token_ids: list[int]
    seed: int
    num_prompt_tokens: int = PROMPT_TOKENS
    choice: int = 0
    end_tokens: tuple[int, ...] = (0, 2)
    bad_words: Sequence[Sequence[int]] = ()
    mask: NDArray[np.uint32] | None = None
    num_prompt_logprobs: int | None = None
    sampler_state: object | None = field(default=None)

    def allowed_tokens(self) -> NDArray[np.uint32] | None:
        return self.mask


class TimedRunner(ModelRunner):
    """Keeps the logits of the last step, and how long its forward took."""

    logits: torch.Tensor
    seconds: float

    def forward(self, batch: PagedBatch) -> torch.Tensor:
        start = time.perf_counter()
        self.logits = super().forward(batch)
        self.seconds = time.perf_counter() - start
        return self.logits


def main() -> None:
    arguments = benchmark_parser(__doc__, quick="10 steps instead of 40").parse_args()
    settings = load_settings(FLAGS)
    served = build_model(settings)
    runner = TimedRunner(served.engine.runner._model, served.engine.runner._kv_cache)
    served.engine.runner = runner
    prompts = make_prompts(locate_embedded(settings.cache_dir))
    rounds = 10 if arguments.quick else 40
    start_decoding(served, prompts, rounds + 8)
    kinds = make_kinds(prompts, runner.logits.shape[1])

    with timed() as run:
        seconds = take_turns(served, runner, kinds, rounds)
    print_table(seconds, run.foreign)
    step, mixed = (statistics.median(seconds[name]) for name in ("decode step", "mixed"))
    figures = {
        "sampling_over_step_mixed": mixed / step,
        "sampling_over_step_greedy": statistics.median(seconds["greedy"]) / step,
        "sampling_ms_mixed": 1e3 * mixed,
    }
    report(
        figures,
        settings={**FLAGS, "rows": ROWS, "rounds": rounds, "quick": arguments.quick},
        path=arguments.json,
    )


def make_prompts(folder: Path) -> list[list[int]]:
    """Real English, as many tokens for each row."""
    pieces = make_workload(AutoTokenizer.from_pretrained(folder), 4 * ROWS)
    tokens = [token for piece in pieces for token in piece.token_ids]
    return [tokens[row * PROMPT_TOKENS :][:PROMPT_TOKENS] for row in range(ROWS)]


def start_decoding(served: ServedModel, prompts: Sequence[Sequence[int]], steps: int) -> None:
    """Run until every request decodes, `steps` steps before the end of each."""
    params = SamplingParams(max_tokens=64 + steps, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        text = served.tokenizer.output_text(params, prompt)
        served.engine.add(Request(str(index), prompt, params, seed=0, choices=[OpenChoice(0, text)]))
    tokens = 0
    while tokens < ROWS:
        tokens = len(served.engine.step())


def make_kinds(prompts: Sequence[Sequence[int]], vocabulary: int) -> dict[str, list[Drawn]]:
    """For each kind of parameters, the 64 rows that have them."""
    dice = np.random.default_rng(0)
    mask = dice.integers(0, 1 << 32, (vocabulary + 31) // 32, dtype=np.uint32)
    output = [int(token) for token in dice.integers(0, vocabulary, OUTPUT_TOKENS)]

    def rows(*kinds: dict[str, object]) -> list[Drawn]:
        return [
            Drawn(SamplingParams.model_validate(kinds[row % len(kinds)]), [*prompt, *output], seed=row)
            for row, prompt in enumerate(prompts)
        ]

    mixed = rows(*MIXED)
    for row, generation in enumerate(mixed):
        generation.mask = mask if row % 4 == 3 else None
        generation.bad_words = [[row], [output[-1], row + 1]] if row % 5 == 4 else ()
    return {
        "greedy": rows({"temperature": 0.0}),
        "temperature": rows({"temperature": 0.8}),
        "top_p": rows({"temperature": 0.8, "top_p": 0.9}),
        "top_k": rows({"temperature": 0.8, "top_k": 50}),
        "mixed": mixed,
        "mixed, all with logprobs=5": rows(*({**kind, "logprobs": 5} for kind in MIXED)),
    }


def take_turns(
    served: ServedModel, runner: TimedRunner, kinds: dict[str, list[Drawn]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of the step and of each kind, round by round; the order of the kinds turns round."""
    sampler = Sampler()
    seconds: dict[str, list[float]] = {name: [] for name in ("decode step", *kinds)}
    for number in range(rounds + 2):
        served.engine.step()
        names = list(kinds)[:: 1 if number % 2 else -1]
        spent = {name: time_of(sampling(sampler, runner.logits, kinds[name])) for name in names}
        if number >= 2:  # the first two warm up: compilation, the notes on each prompt
            seconds["decode step"].append(runner.seconds)
            for name, value in spent.items():
                seconds[name].append(value)
    return seconds


def sampling(sampler: Sampler, logits: torch.Tensor, rows: Sequence[Drawn]) -> Callable[[], None]:
    def sample() -> None:
        for row, token in zip(rows, sampler.sample(logits, rows).tokens, strict=True):
            row.token_ids.append(token)

    return sample


def time_of(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def print_table(seconds: dict[str, list[float]], foreign: float) -> None:
    step = statistics.median(seconds["decode step"])
    table = Table(title=f"milliseconds for {ROWS} rows; others used {foreign:.0%} of the machine")
    for column in ("", "median", "least", "most", "of the step"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in seconds.items():
        median = statistics.median(values)
        times = (f"{1e3 * value:.2f}" for value in (median, min(values), max(values)))
        table.add_row(name, *times, f"{median / step:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
