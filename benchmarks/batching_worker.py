"""One worker process, the model loaded once, that serves a queue with one way of batching after another."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from multiprocessing.connection import Connection

from static_batching import CountingRunner, PaddedRunner, StaticScheduler
from workload import FLAGS

from tidemill_scheduler import BlockId, Scheduler, SchedulerConfig
from tidemill_worker.app import ServedModel, build_model, build_service, queue_opener
from tidemill_worker.engine import Engine, Runner
from tidemill_worker.logs import configure_logs
from tidemill_worker.metrics import Metrics
from tidemill_worker.service import Service
from tidemill_worker.settings import WorkerSettings, load_settings

SETTINGS = FLAGS | {"max_model_len": 1024, "kv_cache_memory": 3.5}
"""Memory for the largest static batch, 64 sequences of the longest that may come: 2.8 GiB of SmolLM2's
KV. Continuous batching has the same."""
STATIC_CLAIM_AHEAD = 64
"""So that the next batch, of whatever size, is full by the time that the one before it has ended."""
CLOSING_TIME = 60.0
"""Seconds that a worker gets to end; it has nothing to do by then."""


class Kind(StrEnum):
    """Ways of batching, from the one that computes the least for nobody to the one that computes the most."""

    CONTINUOUS = "continuous"
    SHRINKING = "shrinking static"
    PACKED = "packed static"
    PADDED = "padded static"


@dataclass(frozen=True)
class Batching:
    """One way of batching, and sequences that run together at most."""

    kind: Kind
    size: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.size}"


@dataclass
class Served:
    """What the worker did with one way of batching; known once that has ended."""

    num_computed_tokens: int = 0


class BatchingWorker:
    """The parent's side of the process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @contextmanager
    def serving(self, batching: Batching) -> Iterator[Served]:
        """Let the worker take jobs with this way of batching until the block ends."""
        served = Served()
        self._pipe.send(batching)
        yield served
        self._pipe.send(None)
        served.num_computed_tokens = self._pipe.recv()


@contextmanager
def running_worker(url: str) -> Iterator[BatchingWorker]:
    """Start the process; yields once its model is loaded."""
    context = multiprocessing.get_context("spawn")
    pipe, its_end = context.Pipe()
    process = context.Process(target=work, args=(its_end, url), daemon=True)
    process.start()
    its_end.close()
    try:
        pipe.recv()
        yield BatchingWorker(pipe)
    finally:
        process.terminate()
        process.join(CLOSING_TIME)


def work(pipe: Connection, url: str) -> None:
    """The process: says when it is ready, then takes turns as `BatchingWorker.serving` asks for them."""
    configure_logs("warning", "console")
    settings = load_settings({**SETTINGS, "redis_url": url})
    model = build_model(settings)
    gc.freeze()
    pipe.send("ready")
    while True:
        batching: Batching = pipe.recv()
        counter = CountingRunner(model.engine.runner)
        config, end_of_text = model.engine.scheduler.config, model.engine.end_of_text
        engine = engine_around(counter, config, end_of_text, batching)
        asyncio.run(serve(make_service(settings, model, engine, batching), pipe))
        pipe.send(counter.num_tokens)


def engine_around(
    runner: Runner, config: SchedulerConfig, end_of_text: frozenset[int], batching: Batching
) -> Engine:
    """An engine that batches in this way, on a runner whose KV cache has `config.num_blocks` blocks."""
    if batching.kind is Kind.CONTINUOUS:
        return Engine(runner, Scheduler(replace(config, max_num_seqs=batching.size)), end_of_text)
    config, scratch = set_scratch_aside(config)
    scheduler = StaticScheduler(
        config,
        batch_size=batching.size,
        pads_prompts=batching.kind is Kind.PADDED,
        keeps_ended=batching.kind is not Kind.SHRINKING,
    )
    return Engine(PaddedRunner(runner, scheduler, scratch), scheduler, end_of_text)


def set_scratch_aside(config: SchedulerConfig) -> tuple[SchedulerConfig, tuple[BlockId, ...]]:
    """Take the blocks that one step of padding needs from the scheduler's."""
    num_scratch = -(-config.max_num_batched_tokens // config.block_size)
    left = config.num_blocks - num_scratch
    scratch = tuple(BlockId(block) for block in range(left, config.num_blocks))
    return replace(config, num_blocks=left), scratch


def make_service(settings: WorkerSettings, model: ServedModel, engine: Engine, batching: Batching) -> Service:
    if batching.kind is not Kind.CONTINUOUS:
        settings = settings.model_copy(update={"claim_ahead": STATIC_CLAIM_AHEAD})
    model = replace(model, engine=engine)
    return build_service(settings, model, queue_opener(settings), Metrics(settings.model_name))


async def serve(service: Service, pipe: Connection) -> None:
    """Serve until something comes through the pipe."""

    def stop() -> None:
        pipe.recv()
        service.request_stop()

    asyncio.get_running_loop().add_reader(pipe.fileno(), stop)
    await service.run()
