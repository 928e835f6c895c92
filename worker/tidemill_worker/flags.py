"""Turns the fields of `WorkerSettings` into command-line options, so that each is described once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, get_args, get_type_hints

import typer
from pydantic import SecretStr

from tidemill_worker.settings import ENV_PREFIX, WorkerSettings


def with_setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command`, which takes `**flags`, one option per setting, for typer to see.

    Values arrive as they were typed, `None` if not given: the settings check them, so that a flag,
    a variable and a default are refused in the same words.
    """
    hints = get_type_hints(WorkerSettings)
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_annotation(name, bool in (hints[name], *get_args(hints[name]))),
        )
        for name in WorkerSettings.model_fields
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _annotation(name: str, is_switch: bool) -> object:
    flag = name.replace("_", "-")
    if is_switch:
        option = typer.Option(f"--{flag}/--no-{flag}", help=_help(name))
        return Annotated[bool | None, option]
    option = typer.Option(f"--{flag}", metavar=_metavar(name), help=_help(name))
    return Annotated[str | None, option]


def _metavar(name: str) -> str:
    choices = [choice for choice in get_args(WorkerSettings.model_fields[name].annotation)]
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    return "VALUE"


def _help(name: str) -> str:
    field = WorkerSettings.model_fields[name]
    text = " ".join((field.description or "").split())
    default = field.get_default(call_default_factory=True)
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    shown = "" if default is None else f" [default: {default}]"
    return f"{text} [{ENV_PREFIX}{name.upper()}]{shown}"
