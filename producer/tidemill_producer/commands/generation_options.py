"""Options of `tidemill submit` that become a job's params; what they mean is in docs/parameters.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

LENGTH = "Length"
SAMPLING = "Sampling"
STRUCTURE = "Structured output"
REPORT = "Report"

MaxTokens = Annotated[int | None, typer.Option(rich_help_panel=LENGTH, help="Tokens to generate at most.")]
MinTokens = Annotated[
    int | None, typer.Option(rich_help_panel=LENGTH, help="Tokens to generate before the text may end.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", rich_help_panel=LENGTH, help="End before this string; may be given again."),
]
Temperature = Annotated[float | None, typer.Option(rich_help_panel=SAMPLING, help="0 is greedy.")]
TopP = Annotated[
    float | None, typer.Option(rich_help_panel=SAMPLING, help="Keep the likeliest tokens up to this share.")
]
TopK = Annotated[
    int | None, typer.Option(rich_help_panel=SAMPLING, help="Keep the K likeliest tokens; 0 keeps all.")
]
MinP = Annotated[
    float | None,
    typer.Option(rich_help_panel=SAMPLING, help="Keep tokens at least this part as likely as the likeliest."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(rich_help_panel=SAMPLING, help="Above 1: avoid what prompt and text have; 1 is off."),
]
PresencePenalty = Annotated[
    float | None, typer.Option(rich_help_panel=SAMPLING, help="Above 0: avoid what the text has.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(rich_help_panel=SAMPLING, help="Above 0: the more, the more often it has it.")
]
Seed = Annotated[int | None, typer.Option(rich_help_panel=SAMPLING, help="Makes sampling repeatable.")]
N = Annotated[
    int | None, typer.Option("--n", "-n", rich_help_panel=SAMPLING, help="Generations of the prompt.")
]
JsonSchema = Annotated[
    str | None,
    typer.Option(metavar="FILE|TEXT", rich_help_panel=STRUCTURE, help="JSON that satisfies this schema."),
]
JsonObject = Annotated[
    bool, typer.Option("--json-object", rich_help_panel=STRUCTURE, help="Any JSON object.")
]
Regex = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", rich_help_panel=STRUCTURE, help="Text that matches from end to end."),
]
Choices = Annotated[
    list[str] | None,
    typer.Option(
        "--choice", metavar="TEXT", rich_help_panel=STRUCTURE, help="One of these; may be given again."
    ),
]
Grammar = Annotated[
    Path | None,
    typer.Option(metavar="FILE", rich_help_panel=STRUCTURE, help="Text of this grammar, Lark or EBNF."),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="K", rich_help_panel=REPORT, help="With --json: how likely each token was, and K others."
    ),
]
Echo = Annotated[bool, typer.Option("--echo", rich_help_panel=REPORT, help="Begin with the prompt.")]
Params = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=JSON",
        rich_help_panel=SAMPLING,
        help="Any other parameter, such as logit_bias; may be given again.",
    ),
]


def structured_outputs(
    *,
    json_schema: str | None,
    json_object: bool,
    regex: str | None,
    choices: Sequence[str] | None,
    grammar: Path | None,
) -> dict[str, Any]:
    """What was asked of the text; whether it is too much is seen with the job.

    Raises:
        typer.BadParameter: a file cannot be read.
    """
    asked = {
        "json": None if json_schema is None else _schema_text(json_schema),
        "json_object": json_object or None,
        "regex": regex,
        "choice": list(choices) if choices else None,
        "grammar": None if grammar is None else _read(grammar, "--grammar"),
    }
    return {name: value for name, value in asked.items() if value is not None}


def other_params(assignments: Sequence[str]) -> dict[str, Any]:
    """Read `NAME=JSON`; what is no JSON is text.

    Raises:
        typer.BadParameter: it has no name.
    """
    params = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{assignment!r} is not NAME=JSON", param_hint="--param")
        try:
            params[name] = json.loads(value)
        except ValueError:
            params[name] = value
    return params


def _schema_text(given: str) -> str:
    """The schema itself if it is written out, else what the file of this name holds."""
    return given if given.lstrip().startswith("{") else _read(Path(given), "--json-schema")


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise typer.BadParameter(f"{path}: {reason}", param_hint=option) from error
