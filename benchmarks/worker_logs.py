"""What workers' logs say of faults of their own."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

ERROR = re.compile(r"level=(error|critical)", re.IGNORECASE)
TRACEBACK = "Traceback"


def complaints(logs: Iterable[Path], expected: Collection[str] = ()) -> list[str]:
    """Lines that tell of an error, each with its log; a traceback's first one with the line before it.

    Args:
        expected: words of what is no fault here.
    """
    return [
        f"{log.name}: {line}"
        for log in logs
        for line in _errors(log.read_text(errors="replace").splitlines())
        if not any(words in line for words in expected)
    ]


def _errors(lines: Iterable[str]) -> Iterator[str]:
    for before, line in pairwise(["", *lines]):
        if ERROR.search(line):
            yield line
        elif line.startswith(TRACEBACK):
            yield f"{before} {line}".strip()
