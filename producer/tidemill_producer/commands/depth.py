"""`tidemill queue`: how much waits, for whom, and whether anybody serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from tidemill.client import DEFAULT_URL, Client
from tidemill.discovery import queue_names
from tidemill.moves import QueueDepth
from tidemill_producer.commands.options import AsJson, Queues, RedisUrl, print_json
from tidemill_producer.commands.prometheus import exposition


def queue(
    queues: Queues = None,
    redis_url: RedisUrl = DEFAULT_URL,
    as_json: AsJson = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics in Prometheus's text format.")
    ] = False,
) -> None:
    """Show the depth of queues, by priority and tenant.

    `waiting` jobs want a worker now, `delayed` ones after a backoff; `running` ones have one. `dead`
    counts jobs that were given up after too many lost workers.
    """
    if as_json and prometheus:
        raise typer.BadParameter("give --json or --prometheus, not both", param_hint="--json")
    looks = asyncio.run(_look(redis_url, queues))
    depths = {name: depth for name, (depth, _) in looks.items()}
    if prometheus:
        print(exposition(depths), end="")
    elif as_json:
        for name, (depth, model) in looks.items():
            print_json(_as_json(name, depth, model))
    else:
        _print_table(looks)


async def _look(url: str, names: list[str] | None) -> dict[str, tuple[QueueDepth, str | None]]:
    """Depth of each queue, and the model it is served with, if any."""
    looks: dict[str, tuple[QueueDepth, str | None]] = {}
    for name in names or await queue_names(url):
        async with Client(url, queue=name) as client:
            card = await client.model_card()
            looks[name] = await client.depth(), card.model if card else None
    return looks


def _as_json(name: str, depth: QueueDepth, model: str | None) -> dict[str, Any]:
    return {
        "queue": name,
        "model": model,
        "total": depth.total,
        "waiting": depth.waiting,
        "running": depth.running,
        "delayed": depth.delayed,
        "dead_letters": depth.dead_letters,
        "oldest_waiting": depth.oldest_waiting,
        "by_tenant": [
            {"priority": priority, "tenant": tenant, "waiting": count}
            for (priority, tenant), count in depth.by_tenant.items()
        ],
    }


def _print_table(looks: Mapping[str, tuple[QueueDepth, str | None]]) -> None:
    row = "{:<32} {:>9} {:>9} {:>9} {:>6} {:>10}  {}".format
    print(row("QUEUE", "WAITING", "RUNNING", "DELAYED", "DEAD", "OLDEST", "SERVED WITH"))
    for name, (depth, model) in looks.items():
        age = "-" if depth.oldest_waiting is None else f"{depth.oldest_waiting:.0f} s"
        numbers = (depth.waiting, depth.running, depth.delayed, depth.dead_letters)
        print(row(name, *numbers, age, model or "nobody serves this queue"))
        for (priority, tenant), count in sorted(depth.by_tenant.items()):
            print(f"  {priority + ' ' + tenant:<30} {count:>9}")
