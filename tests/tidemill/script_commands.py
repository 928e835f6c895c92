"""Which commands a move may run: what its script says, and the functions that it calls, however deep."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files

from tidemill.scripts import LIBRARIES, Move

CALL = re.compile(r"redis\.p?call\('([A-Z]+)'(?:, '([A-Z]+)')?")
WITH_SUBCOMMANDS = ("MEMORY", "XGROUP", "XINFO")


def _text(name: str) -> str:
    source = (files("tidemill") / "lua" / f"{name}.lua").read_text()
    return re.sub(r"--.*", "", source)


def _functions() -> tuple[dict[str, str], str]:
    """The libraries' functions by name, and what the libraries do besides, whoever includes them."""
    functions: dict[str, str] = {}
    rest = ""
    for name in LIBRARIES:
        text = _text(name)
        for start, end in _spans(text):
            block = text[start:end]
            functions[block.split("(", 1)[0].split()[-1]] = block
        rest += _outside(text)
    return functions, rest


def _spans(text: str) -> Iterable[tuple[int, int]]:
    """Where each top-level function begins and ends."""
    for head in re.finditer(r"^local function \w+\(.*$", text, re.MULTILINE):
        if head.group().rstrip().endswith(" end"):
            yield head.span()
        else:
            yield head.start(), text.index("\nend", head.end()) + len("\nend")


def _outside(text: str) -> str:
    for start, end in reversed(list(_spans(text))):
        text = text[:start] + text[end:]
    return text


def commands_of(move: Move) -> set[str]:
    """As an access list names them: `xadd`, `xgroup|create`."""
    functions, text = _functions()
    text += _text(move)
    reached: set[str] = set()
    while new := {name for name in re.findall(r"(?<![.\w'])\w+\b", text) if name in functions} - reached:
        reached |= new
        text += "".join(functions[name] for name in new)
    return {
        f"{command}|{argument}".lower() if command in WITH_SUBCOMMANDS else command.lower()
        for command, argument in CALL.findall(text)
    }
