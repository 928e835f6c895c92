"""Options that several commands share, and what they print with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer

from tidemill.exit_codes import ExitCode
from tidemill.jobs import Result, Status
from tidemill.moves import JobView

QueueName = Annotated[
    str,
    typer.Option("--queue", "-q", envvar="TIDEMILL_QUEUE", help="The queue, usually named after its model."),
]
Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", metavar="NAME", help="Only this one; may be given again. Default: all."),
]
RedisUrl = Annotated[
    str,
    typer.Option(
        "--redis-url",
        envvar="REDIS_URL",
        metavar="URL",
        help="redis://[user:password@]host[:port][/database], or one of rediss://, unix://, redis+sentinel://,"
        " rediss+sentinel://, redis+cluster:// and rediss+cluster:// (docs/connections.md).",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, one object a line.")]
JobIdArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `submit` printed it.")]
WaitForRoom = Annotated[
    float,
    typer.Option(
        "--wait-for-room",
        min=0.0,
        metavar="SECONDS",
        help="Go on trying this long while the queue is full; then exit status 6.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", min=0.0, metavar="SECONDS", help="Wait no longer than this; exit status 5."),
]


def print_json(value: Mapping[str, Any]) -> None:
    """One object on one line, flushed so that a reader of the pipe gets it now."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_fields(fields: Mapping[str, Any]) -> None:
    """A line for each that there is anything to say of."""
    for name, value in fields.items():
        if value is not None and value != {}:
            shown = ", ".join(value) if isinstance(value, dict) else value
            print(f"{name:<20} {shown}")


def complain(message: str) -> None:
    """One line for people."""
    print(f"tidemill: {message}", file=sys.stderr)


def result_as_json(result: Result) -> dict[str, Any]:
    """All fields of a result, those at their defaults too."""
    return result.model_dump(mode="json")


def view_as_json(view: JobView) -> dict[str, Any]:
    """All fields of a job's view."""
    return {field.name: getattr(view, field.name) for field in fields(view)} | {"replies": dict(view.replies)}


def exit_code_of(result: Result) -> ExitCode:
    """0 for a generation, 1 for any other answer."""
    return ExitCode.OK if result.status is Status.SUCCEEDED else ExitCode.FAILED


def headline(index: int, n: int) -> str:
    """What stands over the text of one of several generations."""
    return f"--- {index + 1} of {n}"


def print_result(result: Result, *, as_json: bool) -> ExitCode:
    """The text of each generation, or why there is none; returns the exit status that says which."""
    if as_json:
        print_json(result_as_json(result))
    elif result.status is Status.SUCCEEDED:
        for choice in result.choices:
            if result.alternatives:
                print(headline(choice.index, len(result.choices)))
            print(choice.text, flush=True)
    else:
        reason = f" ({result.error.code}): {result.error.message}" if result.error else ""
        complain(f"job {result.id} {result.status}{reason}")
    return exit_code_of(result)
