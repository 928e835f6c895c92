"""Documents from files, folders and standard input, one at a time.

What cannot be read is yielded too, as `Unreadable`, in its place: one bad file never hides the rest.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

STDIN = "-"
SUFFIXES = frozenset({".txt", ".text", ".md", ".markdown"})
"""What is taken from a folder. A file named by itself is read whatever its suffix."""

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text and the name people know it by (its path as given, or `-`)."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Something that was asked for and holds no text, and why."""

    name: str
    reason: str


def find_documents(paths: Iterable[str], *, exclude: Path | None = None) -> Iterator[str | Unreadable]:
    """The files that `paths` name, lazily: files as given, folders in sorted order, `-` as it is.

    `exclude` is a folder that is not entered (where the summaries go, say). Hidden files and folders
    are passed over, symbolic links to folders are not followed.
    """
    for path in paths:
        if path != STDIN and os.path.isdir(path):
            yield from _walk(Path(path), exclude.resolve() if exclude else None)
        else:
            yield path


def read_documents(found: Iterable[str | Unreadable], *, stdin: BinaryIO) -> Iterator[Document | Unreadable]:
    """Read what `find_documents` found, one at a time."""
    for name in found:
        if isinstance(name, Unreadable):
            yield name
        elif name == STDIN:
            yield _decode(STDIN, stdin.read())
        else:
            yield _read_file(name)


def _walk(folder: Path, exclude: Path | None) -> Iterator[str | Unreadable]:
    failures: list[OSError] = []
    empty = True
    for parent, folders, files in os.walk(folder, onerror=failures.append):
        here = Path(parent)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and (here / f).resolve() != exclude)
        for file in sorted(files):
            if not file.startswith(".") and Path(file).suffix.lower() in SUFFIXES:
                empty = False
                yield str(here / file)
    for failure in failures:
        yield _unreadable(failure, str(folder))
    if empty and not failures:
        yield Unreadable(str(folder), f"no {', '.join(sorted(SUFFIXES))} file in this folder")


def _read_file(name: str) -> Document | Unreadable:
    try:
        return _decode(name, Path(name).read_bytes())
    except OSError as error:
        return _unreadable(error, name)


def _unreadable(error: OSError, default: str) -> Unreadable:
    return Unreadable(str(error.filename or default), (error.strerror or str(error)).lower())


def _decode(name: str, data: bytes) -> Document | Unreadable:
    """UTF-8, or UTF-16 that says so by its byte order mark; nothing is guessed."""
    mark, encoding = next(((m, e) for m, e in _BYTE_ORDER_MARKS if data.startswith(m)), (b"", "utf-8"))
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        offset = error.start + len(mark)
        return Unreadable(name, f"not {encoding} at byte {offset}: {error.reason}")
    if not text.strip():
        return Unreadable(name, "empty")
    return Document(name, text.replace("\r\n", "\n").replace("\r", "\n"))
