"""The composition root: builds a worker from its settings and lets it serve."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.card import ModelCard
from tidemill.connection import connect
from tidemill.errors import ConfigurationError, QueueUnavailable
from tidemill.exit_codes import ExitCode
from tidemill.moves import QueueSettings
from tidemill.params import SamplingParams
from tidemill.queue import Queue
from tidemill.registry import WorkerReport, WorkerState
from tidemill_scheduler.scheduler import Scheduler
from tidemill_worker.admission import Admission, ModelLimits
from tidemill_worker.announcer import HEARTBEAT
from tidemill_worker.answers import Answers
from tidemill_worker.endpoint import Endpoint
from tidemill_worker.engine import Engine
from tidemill_worker.fingerprint import fingerprint_of
from tidemill_worker.grammar import GrammarCompiler
from tidemill_worker.health import HealthProbe
from tidemill_worker.leases import OpenQueue
from tidemill_worker.metrics import Metrics
from tidemill_worker.recorder import CONCURRENCY
from tidemill_worker.request import OpenChoice, Request
from tidemill_worker.service import Service, ServiceConfig
from tidemill_worker.settings import EMBEDDED_MODEL, WorkerSettings
from tidemill_worker.signals import StopSignals
from tidemill_worker.sizing import GIB, Choice, Sizing, defaults_of, kv_cache_memory, scheduler_config, size
from tidemill_worker.tokenizer import Tokenizer
from tidemill_worker.waiting import pauses
from tidemill_worker.watchdog import Watchdog

if TYPE_CHECKING:
    import torch

CONNECTIONS = CONCURRENCY + 4
"""Of the I/O loop: results on their way, a claim, the card, and some to spare."""


@dataclass(frozen=True)
class ServedModel:
    """A model ready to serve: its engine, its tokenizer and what they can take."""

    engine: Engine
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    limits: ModelLimits
    sizing: Sizing
    fingerprint: str
    device: str
    dtype: str


def serve(settings: WorkerSettings, signals: StopSignals) -> bool:
    """Serve until SIGTERM or SIGINT, which `signals` has caught since the process began.

    If the engine stalls, or a stop does not end, the process exits from in here.

    Returns:
        Whether everything held was finished or handed back, and no part has failed.

    Raises:
        ConfigurationError, ModelUnsupported: the settings or the model are wrong.
        QueueUnavailable: Redis cannot be used at the start.
    """
    open_queue = queue_opener(settings)
    asyncio.run(_await_redis(open_queue, settings.redis_wait))
    metrics, probe = Metrics(settings.model_name), HealthProbe()
    with _endpoint(settings, metrics, probe):
        started = time.monotonic()
        model = build_model(settings)
        # Model and libraries stay as long as the process does: the collector need not walk them again,
        # nor the interpreter take them apart at its end, which took 1.3 s of every stop.
        gc.freeze()
        structlog.get_logger().info(
            "model_loaded",
            model=settings.model_name,
            device=model.device,
            dtype=model.dtype,
            seconds=round(time.monotonic() - started, 1),
            max_model_len=model.limits.max_model_len,
            kv_cache_tokens=model.sizing.kv_tokens,
            swap_tokens=model.sizing.swap_tokens,
        )
        structlog.get_logger().info("sized", **_told(model.sizing.choices))
        service = build_service(settings, model, open_queue, metrics)
        metrics.watch(lambda: service.engine.stats, has_swap_space=model.sizing.num_swap_blocks > 0)
        metrics.watch_service(service.stats)
        probe.service = service
        stall_timeout = settings.stall_timeout
        with Watchdog(
            service, stall_timeout=stall_timeout, terminate=_exit_now, hang_timeout=2 * stall_timeout
        ):
            try:
                clean = asyncio.run(_run(service, signals))
            finally:
                model.grammars.close()
        if service.has_running_threads:  # amid a long step, say: nothing is torn down around it
            _exit_now(ExitCode.OK if clean else ExitCode.FAILED)
        return clean


def _told(choices: Mapping[str, Choice[Any]]) -> dict[str, object]:
    """Values and reasons, for one line of the log."""
    reasons = "; ".join(f"{name}: {choice.reason}" for name, choice in choices.items())
    return {name: choice.value for name, choice in choices.items()} | {"reasons": reasons}


def build_model(settings: WorkerSettings) -> ServedModel:
    """Find, load and warm up the model, and put the engine around it."""
    import torch
    from transformers.utils import logging as transformers_logging

    from tidemill_kernels.openmp import release_threads
    from tidemill_worker.model.architecture import context_length, vocabulary_size
    from tidemill_worker.model.device import choose_device, choose_dtype, gpu_obstacle, machine_facts
    from tidemill_worker.model.kv_cache import KVCacheSpec
    from tidemill_worker.model.loader import end_of_text_tokens, load_config, load_model, stored_dtype
    from tidemill_worker.model.runner import ModelRunner

    transformers_logging.disable_progress_bar()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device, settings.dtype, obstacle=gpu_obstacle())
    folder = _locate(settings)
    dtype = choose_dtype(settings.dtype, device, stored=stored_dtype(load_config(folder)))
    loaded = load_model(folder, device=device, dtype=dtype)
    model = loaded.model
    sizing = size(
        settings,
        KVCacheSpec.for_layers(loaded.layers, block_size=settings.block_size, dtype=dtype),
        context=context_length(model.config),
        kv_cache_memory=_kv_cache_memory(settings, device),
        defaults=defaults_of(device.type),
    )
    config = scheduler_config(settings, sizing)
    end_of_text = end_of_text_tokens(model)
    tokenizer = Tokenizer.from_pretrained(folder, vocab_size=vocabulary_size(model))
    runner = ModelRunner(model, *_allocate(sizing, device))
    rehearse(Engine(runner, Scheduler(config), end_of_text), tokenizer)
    if config.num_swap_blocks:
        runner.measure_costs(config.max_num_batched_tokens)
    release_threads()  # those of this thread; the engine will run on one of its own
    return ServedModel(
        engine=Engine(runner, Scheduler(config), end_of_text),
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer, end_of_text),
        limits=ModelLimits(
            model_name=settings.model_name,
            max_model_len=config.max_model_len,
            max_total_tokens=config.kv_cache_tokens,
            end_of_text=end_of_text,
        ),
        sizing=sizing,
        fingerprint=fingerprint_of(folder, str(dtype), *machine_facts(device)),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
    )


def _locate(settings: WorkerSettings) -> Path:
    from tidemill_worker.model.checkpoint import locate, locate_embedded

    if settings.model == EMBEDDED_MODEL:
        return locate_embedded(settings.cache_dir)
    return locate(settings.model, settings.cache_dir)


def _kv_cache_memory(settings: WorkerSettings, device: torch.device) -> int:
    """Bytes for the KV cache; the model is on the device already."""
    from tidemill_worker.model.device import gpu_kv_cache_memory

    memory = kv_cache_memory(settings, defaults_of(device.type))
    return gpu_kv_cache_memory(device, settings.gpu_memory_utilization) if memory is None else memory


def _allocate(sizing: Sizing, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The KV cache and the swap space."""
    from tidemill_worker.model.device import place

    spec = sizing.spec
    with _taking("kv_cache_memory", sizing.num_blocks * spec.bytes_per_block, f"on {place(device)}"):
        kv_cache = spec.allocate(sizing.num_blocks, device)
    with _taking("swap_space", sizing.num_swap_blocks * spec.bytes_per_block, "of CPU memory"):
        return kv_cache, spec.allocate_swap_space(sizing.num_swap_blocks, device)


@contextmanager
def _taking(setting: str, memory: int, where: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # also CUDA's own error, which is one
        raise ConfigurationError(f"{setting}: cannot take {memory / GIB:.1f} GiB {where}") from error


def rehearse(engine: Engine, tokenizer: Tokenizer) -> None:
    """Generate a little, so that what compiles or allocates at its first use does so before a job."""
    params = SamplingParams(
        n=2, max_tokens=2, top_p=0.9, min_p=0.1, presence_penalty=1.0, logprobs=1, prompt_logprobs=1
    )
    choices = [OpenChoice(index, tokenizer.output_text(params)) for index in range(params.n)]
    engine.add(Request("rehearsal", [0, 0, 0], params, 0, choices))
    while engine.has_unfinished:
        engine.step()


def build_service(
    settings: WorkerSettings, model: ServedModel, open_queue: OpenQueue, metrics: Metrics
) -> Service:
    """The service around a model that is ready."""
    report = _first_report(settings, model)
    answers = Answers(model=settings.model_name, worker=report.name)
    return Service(
        ServiceConfig(
            capacity=report.capacity,
            claim_ahead=settings.claim_ahead,
            lease=settings.lease,
            renewal=settings.renewal_interval,
            stream_interval=settings.stream_interval,
            grace_period=settings.grace_period,
        ),
        engine=model.engine,
        admission=Admission(model.tokenizer, model.grammars, model.limits, answers),
        card=ModelCard(
            model=settings.model_name,
            max_model_len=model.limits.max_model_len,
            max_total_tokens=model.limits.max_total_tokens,
            chat_template_overhead=model.tokenizer.chat_template_overhead,
            fingerprint=model.fingerprint,
            tokenizer_zlib=ModelCard.compress(model.tokenizer.to_json().encode()),
        ),
        report=report,
        open_queue=open_queue,
        observer=metrics,
    )


def _first_report(settings: WorkerSettings, model: ServedModel) -> WorkerReport:
    """Who this worker is; its name is unique per start of a process."""
    host, pid = socket.gethostname(), os.getpid()
    return WorkerReport(
        name=f"{host}-{pid}-{secrets.token_hex(4)}",
        queue=settings.queue_name,
        model=settings.model_name,
        host=host,
        pid=pid,
        version=version("tidemill"),
        fingerprint=model.fingerprint,
        device=model.device,
        state=WorkerState.SERVING,
        capacity=model.sizing.max_num_seqs.value + settings.claim_ahead,
        running=0,
        waiting=0,
        held=0,
        unrecorded=0,
        kv_usage=0.0,
        uptime=0.0,
        heartbeat=HEARTBEAT,
    )


def queue_opener(settings: WorkerSettings) -> OpenQueue:
    """How each event loop of the worker opens the queue, with connections of its own."""
    queue_settings = QueueSettings(lease=settings.lease, max_attempts=settings.max_attempts)

    @asynccontextmanager
    async def open_queue() -> AsyncIterator[Queue]:
        url = settings.redis_url.get_secret_value()
        redis = connect(url, queue=settings.queue_name, max_connections=CONNECTIONS)
        queue = Queue(redis, settings.queue_name, queue_settings)
        try:
            yield queue
        finally:
            await queue.aclose()
            await redis.aclose()

    return open_queue


@contextmanager
def _endpoint(settings: WorkerSettings, metrics: Metrics, probe: HealthProbe) -> Iterator[None]:
    """Listen before the model is loaded, so that a port in use is known at once."""
    if not settings.metrics_port:
        yield
        return
    endpoint = Endpoint(
        settings.metrics_host, settings.metrics_port, metrics=metrics.exposition, health=probe
    )
    try:
        yield
    finally:
        endpoint.close()


async def _run(service: Service, signals: StopSignals) -> bool:
    signals.pass_to(partial(asyncio.get_running_loop().call_soon_threadsafe, service.request_stop))
    try:
        return await service.run()
    finally:
        signals.ignore()


def _exit_now(status: ExitCode) -> None:
    """End the process, whatever its threads are doing."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


async def _await_redis(open_queue: OpenQueue, patience: float) -> None:
    deadline = time.monotonic() + patience
    async with open_queue() as queue:
        for pause in pauses():
            try:
                return await queue.ping()
            except QueueUnavailable:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(pause)
