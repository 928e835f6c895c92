"""The worker's commands, mounted under `tidemill`. Heavy imports happen when a command runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tidemill.exit_codes import ExitCode
from tidemill_worker.flags import with_setting_flags
from tidemill_worker.logs import configure_logs
from tidemill_worker.settings import load_settings
from tidemill_worker.signals import catch_stop_signals

PLANNED = (
    *("model", "served_model_name", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("block_size", "kv_cache_memory", "gpu_memory_utilization", "swap_space", "preemption_mode"),
    "enable_chunked_prefill",
)
"""The worker's settings that decide over memory."""
MARKS = {"ok": "ok  ", "warning": "warn", "failed": "FAIL"}


@with_setting_flags()
def worker(**flags: object) -> None:
    """Serve a queue with a model until SIGTERM or Ctrl-C.

    The first signal lets running jobs finish within the grace period and hands back the rest, the
    second hands back everything at once. Every option can also be set by its variable, shown in
    brackets.
    """
    signals = catch_stop_signals()
    settings = load_settings(flags)
    configure_logs(settings.log_level, settings.log_format)
    from tidemill_worker.app import serve

    raise typer.Exit(ExitCode.OK if serve(settings, signals) else ExitCode.FAILED)


@with_setting_flags(only=PLANNED)
def plan(
    *,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="GIB", help="Memory of the GPU, in GiB; without it: a worker on CPU."),
    ] = None,
    mean_length: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="TOKENS", help="Tokens of an ordinary job, prompt and output. [default: 256]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **flags: object,
) -> None:
    """Work out what a model leaves room for, and the settings that go with it.

    Neither the model's weights nor a GPU are needed: a folder with a config.json is enough, or the
    file itself. The other options are the worker's, and mean the same.
    """
    settings = load_settings(flags)
    from tidemill_worker.capacity import plan_capacity, report

    capacity = plan_capacity(settings, gpu_memory=gpu_memory, mean_length=mean_length)
    for line in [json.dumps(capacity.figures)] if as_json else report(capacity):
        typer.echo(line)


def demo(
    *,
    packages: Annotated[
        int, typer.Option(min=1, help="Summarize the descriptions of this many installed packages.")
    ] = 12,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget earlier demos instead of going on where they stopped.")
    ] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for the converted model and the queue's data.")
    ] = None,
) -> None:
    """Summarize real documents with a real model through a real queue, all started here.

    Nothing keeps running afterwards. After Ctrl-C, the same command goes on where it stopped.
    """
    settings = load_settings({"cache_dir": cache_dir})
    configure_logs("warning", "console")
    from tidemill_worker.demo import run_demo

    raise typer.Exit(run_demo(settings, packages=packages, fresh=fresh))


def doctor(
    *,
    redis_url: Annotated[
        str | None, typer.Option(help="redis://[user:password@]host[:port][/database] [REDIS_URL]")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model to look for.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder for converted models.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object per check, a line each.")] = False,
) -> None:
    """Check whether this machine can run a worker, and say what is wrong.

    Exit status 1 if a check failed; warnings do not count.
    """
    settings = load_settings({"redis_url": redis_url, "model": model, "cache_dir": cache_dir})
    from tidemill_worker.doctor import Verdict, examine

    checks = examine(settings)
    for check in checks:
        for_people = f"{MARKS[check.verdict]}  {check.name}: {check.message}"
        typer.echo(json.dumps(asdict(check)) if as_json else for_people)
    failed = any(check.verdict is Verdict.FAILED for check in checks)
    raise typer.Exit(ExitCode.FAILED if failed else ExitCode.OK)
