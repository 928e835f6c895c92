"""Where sentences, lines and paragraphs end, in any of the languages that mark it."""

from __future__ import annotations

import re
from itertools import pairwise

# ruff: noqa: RUF001 - the punctuation of many languages is meant

PARAGRAPH = re.compile(r"\n[ \t]*+\n\s*+|\n(?=[ \t]{0,3}#{1,6} )")
SENTENCE = re.compile(
    r"""
      (?<![.!?…])[.!?…][.!?…"'”’»)\]*_]*+(?=\s++[^a-zß-ÿа-яё]|\s*+\Z)  # not in "e.g. this" or "3.14"
    | [。！？｡．][。！？」』”’）】]*+             # no space follows in Chinese and Japanese
    | [।॥؟۔።။]++                             # Indic, Arabic, Urdu, Ethiopic, Burmese
    | \n(?=[ \t]*+(?:[-*+•]|\d{1,3}[.)])[ \t])  # a list item stands by itself
    """,
    re.VERBOSE,
)
LINE = re.compile(r"\n")
LOOP = re.compile(r"(?<!\S)(\S++(?:\s++\S++){0,11}?)(?:\s++\1(?!\S)){3,}")
"""Up to a dozen words, four times or more in a row."""

_LOOKAHEAD = 8
"""Characters past the end of a search that a pattern may look at."""


def last_end(pattern: re.Pattern[str], text: str, start: int, end: int) -> int:
    """The end of the last match in `text` that ends in `(start, end]`, or `start`."""
    found = start
    for match in pattern.finditer(text, start, min(len(text), end + _LOOKAHEAD)):
        if match.end() > end:
            break
        found = match.end()
    return found


def whole_sentences(text: str) -> str:
    """`text` without a last sentence that was cut off; all of it if nothing else would be left."""
    return text[: last_end(SENTENCE, text, 0, len(text))].strip() or text


def without_repeats(text: str) -> str:
    """`text` with each sentence, line and loop of words once: small models like to go round in circles."""
    kept: list[str] = []
    seen: set[str] = set()
    for piece in _pieces(LOOP.sub(r"\1", text)):
        key = "".join(filter(str.isalnum, piece.casefold()))
        if not key or key not in seen:
            seen.add(key)
            kept.append(piece)
    return re.sub(r"\n{3,}", "\n\n", "".join(kept)).strip()


def _pieces(text: str) -> list[str]:
    ends = {match.end() for pattern in (SENTENCE, LINE) for match in pattern.finditer(text)}
    bounds = sorted({0, *ends, len(text)})
    return [text[start:end] for start, end in pairwise(bounds)]
