"""Turns the fields of `WorkerSettings` into command-line options, so that each is described once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Annotated, get_args, get_type_hints

import typer
from pydantic import SecretStr

from tidemill_worker.settings import ENV_PREFIX, WorkerSettings


def with_setting_flags(
    *, only: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, which takes `**flags` after what is its own, one option per setting, for typer to see.

    Args:
        only: these settings; default: all of them.

    Values arrive as they were typed, `None` if not given: the settings check them, so that a flag,
    a variable and a default are refused in the same words.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in inspect.signature(command).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        settings = [_parameter(name) for name in WorkerSettings.model_fields if only is None or name in only]
        parameters = [*own, *settings]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions take any
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return give


def _parameter(name: str) -> inspect.Parameter:
    hint = get_type_hints(WorkerSettings)[name]
    annotation = _annotation(name, bool in (hint, *get_args(hint)))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _annotation(name: str, is_switch: bool) -> object:
    flag = name.replace("_", "-")
    if is_switch:
        option = typer.Option(f"--{flag}/--no-{flag}", help=_help(name))
        return Annotated[bool | None, option]
    option = typer.Option(f"--{flag}", metavar=_metavar(name), help=_help(name))
    return Annotated[str | None, option]


def _metavar(name: str) -> str:
    annotation = WorkerSettings.model_fields[name].annotation
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return "|".join(annotation)
    choices = get_args(annotation)
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
