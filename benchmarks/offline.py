"""One workload three ways: static batches by `generate`, our engine called directly, and the queue.

    python benchmarks/offline.py [--quick] [--json PATH]

All ways generate the same number of tokens for the same prompts with the same float32 weights and
as many threads. They take turns (A B C, C B A), so that a machine that slows down slows all.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from measure import Series, benchmark_parser, print_series, report, timed
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from workload import FLAGS, Piece, make_workload

from tidemill import Job, SamplingParams
from tidemill.client import Client
from tidemill_worker.app import ServedModel, build_model
from tidemill_worker.embedded import embedded_valkey
from tidemill_worker.model.checkpoint import locate_embedded
from tidemill_worker.request import OpenChoice, Request
from tidemill_worker.settings import WorkerSettings, load_settings

ROUNDS = 1
"""Each contender runs twice a round; one of static batching takes minutes."""


def main() -> None:
    arguments = benchmark_parser(__doc__, quick="32 requests instead of 128").parse_args()
    settings = load_settings(FLAGS)
    served = build_model(settings)
    folder = locate_embedded(settings.cache_dir)
    count = 32 if arguments.quick else 128
    pieces = make_workload(AutoTokenizer.from_pretrained(folder), count)
    tokens = sum(piece.num_output for piece in pieces)
    print(f"{count} requests, {sum(len(p.token_ids) for p in pieces)} prompt tokens, {tokens} output tokens")

    static = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    with running_queue(settings) as url:
        contenders: dict[str, Callable[[Sequence[Piece]], None]] = {
            "static, batches of 8": lambda work: run_static(static, work, 8),
            "static, batches of 16": lambda work: run_static(static, work, 16),
            "direct": lambda work: run_direct(served, work),
            "queue": lambda work: asyncio.run(run_queue(url, settings.queue_name, work)),
        }
        series = take_turns(contenders, pieces, tokens, rounds=ROUNDS)

    print_series("output tokens per second", list(series.values()))
    best_static = max(series["static, batches of 8"].rate, series["static, batches of 16"].rate)
    figures = {
        "direct_over_static": series["direct"].rate / best_static,
        "queue_over_direct": series["queue"].rate / series["direct"].rate,
        "direct_tokens_per_s": series["direct"].rate,
        "static_tokens_per_s": best_static,
    }
    report(figures, settings={**FLAGS, "requests": count, "quick": arguments.quick}, path=arguments.json)


def take_turns(
    contenders: dict[str, Callable[[Sequence[Piece]], None]],
    pieces: Sequence[Piece],
    tokens: int,
    *,
    rounds: int,
) -> dict[str, Series]:
    """Warm all contenders up, then run them forwards and backwards in turn."""
    series = {name: Series(name, tokens) for name in contenders}
    for run in contenders.values():
        run([Piece(piece.prompt, piece.token_ids, 4) for piece in pieces[:4]])
    for _ in range(rounds):
        for name in [*contenders, *reversed(contenders)]:
            with timed() as measured:
                contenders[name](pieces)
            series[name].runs.append(measured)
            print(f"  {name}: {tokens / measured.seconds:.1f} tokens/s", flush=True)
    return series


@torch.inference_mode()
def run_static(model: PreTrainedModel, pieces: Sequence[Piece], size: int) -> None:
    """Classic batching: pad to the longest prompt, generate until the longest output is done."""
    for first in range(0, len(pieces), size):
        batch = pieces[first : first + size]
        width = max(len(piece.token_ids) for piece in batch)
        length = max(piece.num_output for piece in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros(len(batch), width, dtype=torch.long)
        for row, piece in enumerate(batch):
            ids[row, width - len(piece.token_ids) :] = torch.tensor(piece.token_ids)
            mask[row, width - len(piece.token_ids) :] = 1
        model.generate(  # type: ignore[operator]  # a Module attribute, as far as mypy can see
            ids, attention_mask=mask, max_new_tokens=length, min_new_tokens=length, do_sample=False
        )


def run_direct(served: ServedModel, pieces: Sequence[Piece]) -> None:
    """The engine in this process, with detokenization, as the worker runs it."""
    for index, piece in enumerate(pieces):
        params = params_of(piece)
        choice = OpenChoice(0, served.tokenizer.output_text(params, piece.token_ids))
        served.engine.add(Request(str(index), piece.token_ids, params, seed=0, choices=[choice]))
    while served.engine.has_unfinished:
        served.engine.step()


async def run_queue(url: str, queue: str, pieces: Sequence[Piece]) -> None:
    """A client's whole way: submit, wait, read every result."""
    async with Client(url, queue=queue) as client:
        jobs = [Job(prompt=piece.prompt, params=params_of(piece)) for piece in pieces]
        job_ids = [job_id async for job_id in client.submit_many(jobs)]
        async for result in client.as_completed(job_ids):
            result.raise_for_status()


def params_of(piece: Piece) -> SamplingParams:
    return SamplingParams(max_tokens=piece.num_output, temperature=0.0, ignore_eos=True)


@contextmanager
def running_queue(settings: WorkerSettings) -> Iterator[str]:
    """A server of our own and one worker process; yields the server's URL once it serves."""
    with tempfile.TemporaryDirectory() as folder, embedded_valkey(Path(folder) / "queue") as url:
        command = [sys.executable, "-m", "tidemill", "worker", "--redis-url", url, "--log-level", "warning"]
        worker = subprocess.Popen([*command, *(word for item in FLAGS.items() for word in flag_of(*item))])
        try:
            asyncio.run(await_served(url, settings.queue_name, worker))
            yield url
        finally:
            worker.terminate()
            worker.wait(60)


def flag_of(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


async def await_served(url: str, queue: str, worker: subprocess.Popen[bytes]) -> None:
    async with Client(url, queue=queue) as client:
        while await client.model_card() is None:
            if worker.poll() is not None:
                raise SystemExit(f"the worker ended with status {worker.returncode}")
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    main()
