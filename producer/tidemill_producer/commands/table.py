"""Tables for people. What others have written is shown in one line and cannot steer the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

UNCUT = 1000
"""Columns of a page that is no terminal's: wide enough to cut nothing."""
UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def make_console() -> Console:
    """Standard output, as wide as its terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else UNCUT)


def make_table(*columns: Column) -> Table:
    """An empty table without lines."""
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def one_line(text: str, limit: int | None = None) -> str:
    """`text` without line breaks and control characters, cut to `limit` characters."""
    shown = " ".join(text[: 4 * limit if limit else None].split())
    shown = "".join(character if character.isprintable() else UNPRINTABLE for character in shown)
    return shown if limit is None or len(shown) <= limit else shown[: limit - 1] + "…"


def cell(text: str, style: str = "", *, limit: int | None = None) -> Text:
    """Text of others, which rich must not read as markup."""
    return Text(one_line(text, limit), style)
