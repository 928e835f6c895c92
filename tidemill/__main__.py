"""The `tidemill` command: mounts the components' commands and imports only the one that runs.

So `tidemill --help` is quick, and a machine that only submits jobs needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from operator import itemgetter
from typing import Any

from tidemill.errors import TidemillError
from tidemill.exit_codes import EPILOG, ExitCode, exit_code


@dataclass(frozen=True)
class Mount:
    """Where a command lives, and the extra of this distribution that brings what it needs."""

    target: str
    """`module:function`"""
    summary: str
    extra: str = "cli"
    needs: tuple[str, ...] = ()
    """Modules that are looked for, not imported, before the command's own."""
    first: str = ""
    """`module:function` to call before anything else is imported."""

    def load(self) -> Callable[..., Any]:
        """The command's function.

        Raises:
            MissingExtra: something it needs is not installed.
        """
        missing = next((module for module in self.needs if find_spec(module) is None), None)
        if missing is not None:
            raise MissingExtra(self.extra, missing)
        return _function(self.target)


@dataclass(frozen=True)
class Group:
    """Commands under one word, such as `tidemill dead list`."""

    summary: str
    mounts: Mapping[str, Mount]


def _function(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


class MissingExtra(Exception):
    """An optional part of Tidemill is not installed."""

    def __init__(self, extra: str, module: str | None) -> None:
        super().__init__(f"{module} is not installed; run: pip install 'tidemill[{extra}]'")


COMMANDS: Mapping[str, Mount | Group] = {
    "submit": Mount(
        "tidemill_producer.commands.submit:submit", "Put one job, or a file of them, in a queue."
    ),
    "result": Mount("tidemill_producer.commands.answers:result", "Print the result of a job."),
    "status": Mount("tidemill_producer.commands.answers:status", "Show where a job is."),
    "cancel": Mount("tidemill_producer.commands.answers:cancel", "Cancel a job, waiting or running."),
    "queue": Mount("tidemill_producer.commands.depth:queue", "Show how much is waiting, and for whom."),
    "workers": Mount(
        "tidemill_producer.commands.workers:workers", "Show who serves, and what each worker has room for."
    ),
    "dead": Group(
        "Look at jobs that were given up; requeue or purge them.",
        {
            "list": Mount("tidemill_producer.commands.dead:list_letters", "List them, oldest first."),
            "show": Mount("tidemill_producer.commands.dead:show", "Show all of one, with its error."),
            "requeue": Mount("tidemill_producer.commands.dead:requeue", "Submit some, or all, again."),
            "purge": Mount("tidemill_producer.commands.dead:purge", "Forget some, or all, for good."),
        },
    ),
    "summarize": Mount("tidemill_producer.summarize_command:summarize", "Summarize documents in bulk."),
    "worker": Mount(
        "tidemill_worker.commands:worker",
        "Serve a queue with a model.",
        "worker",
        ("torch", "transformers"),
        first="tidemill_worker.signals:catch_stop_signals",
    ),
    "plan": Mount(
        "tidemill_worker.commands:plan",
        "Work out what a model leaves room for.",
        "worker",
        ("torch", "transformers"),
    ),
    "demo": Mount(
        "tidemill_worker.commands:demo",
        "Summarize real documents, with a queue and a worker started for it.",
        "worker",
        ("torch", "transformers"),
    ),
    "doctor": Mount(
        "tidemill_worker.commands:doctor", "Check this installation and say what is wrong.", "worker"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (`None`: this process's own); returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _run(arguments)
    except (TidemillError, TimeoutError) as error:
        return _fail(str(error), exit_code(error))
    except MissingExtra as error:
        return _fail(str(error), ExitCode.FAILED)
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str]) -> int:
    wanted = [word for word in arguments if not word.startswith("-")]
    mount = _find(COMMANDS, wanted)
    if mount is not None and mount.first:
        _function(mount.first)()
    if find_spec("typer") is None:
        raise MissingExtra("cli", "typer")
    try:
        _build(wanted)(arguments, prog_name="tidemill")
    except SystemExit as end:
        if isinstance(end.code, str):
            return _fail(end.code, ExitCode.FAILED)
        return end.code or ExitCode.OK
    except ModuleNotFoundError as error:
        if mount is None or (error.name or "").startswith("tidemill"):
            raise
        raise MissingExtra(mount.extra, error.name) from error
    return ExitCode.OK


def _find(commands: Mapping[str, Mount | Group], words: Sequence[str]) -> Mount | None:
    """The command that `words` begin with, if they do."""
    found = commands.get(words[0]) if words else None
    return _find(found.mounts, words[1:]) if isinstance(found, Group) else found


def _build(wanted: Sequence[str]) -> Callable[..., Any]:
    """The typer application; only its command `wanted` is real, the others are there for `--help`."""
    import typer

    app: typer.Typer = _application()

    @app.callback()
    def options(
        _version: bool = typer.Option(
            False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ) -> None:
        """Tidemill: batch inference through a durable queue."""

    _mount(app, COMMANDS, _find(COMMANDS, wanted))
    return app


def _application(summary: str | None = None) -> Any:
    """A typer application without commands."""
    import typer

    return typer.Typer(
        help=summary,
        short_help=summary,
        epilog=EPILOG,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _mount(app: Any, commands: Mapping[str, Mount | Group], wanted: Mount | None) -> None:
    for name, command in commands.items():
        if isinstance(command, Group):
            group = _application(command.summary)
            _mount(group, command.mounts, wanted)
            app.add_typer(group, name=name)
        else:
            function = command.load() if command is wanted else _placeholder
            app.command(name, cls=_command_class(), short_help=command.summary, epilog=EPILOG)(function)


def _command_class() -> type[Any]:
    """A command whose help lists the options under the headings they name as their panels."""
    from typer.core import TyperCommand

    class Command(TyperCommand):
        def format_options(self, ctx: Any, formatter: Any) -> None:
            sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
            for param in self.get_params(ctx):
                if (record := param.get_help_record(ctx)) is not None:
                    other = "Arguments" if param.param_type_name == "argument" else "Options"
                    sections.setdefault(getattr(param, "rich_help_panel", None) or other, []).append(record)
            for heading, records in filter(itemgetter(1), sections.items()):
                with formatter.section(heading):
                    formatter.write_dl(records)

    return Command


def _placeholder() -> None:
    raise AssertionError("only the command that was asked for is ever called")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("tidemill"))
        raise SystemExit(ExitCode.OK)


def _fail(message: str, code: ExitCode) -> int:
    print(f"tidemill: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
