"""Splitting a text into chunks of at most so many of the model's own tokens.

A chunk ends, in this order of preference, at a paragraph or heading, at the end of a sentence, at the
end of a line, at the end of a word, and only then anywhere (never inside a character).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator

from tokenizers import Tokenizer

from tidemill_producer.sentences import LINE, PARAGRAPH, SENTENCE, last_end

_WORD = re.compile(r"\s|[，、；：,;:]+")  # noqa: RUF001 - Chinese and Japanese put no spaces

_JOINER = "\u200d"

_EARLIEST = 0.5
"""A paragraph that ends before this share of the room is passed over for a later sentence."""
_CHARACTERS_PER_TOKEN = 4.0
"""First guess for English; every window after that uses what the last one measured."""


@functools.lru_cache(maxsize=2)
def load_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, set once to neither truncate nor pad.

    It is cached because parsing a large vocabulary takes tenths of a second, and never changed
    afterwards, because `tokenizers` objects are safe to share between threads only while nobody does.
    """
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Splitter:
    """Counts and splits by one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        """Tokens of `text`, without any that mark begin or end."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def split(self, text: str, max_tokens: int) -> Iterator[str]:
        """Cut `text` into chunks of at most `max_tokens`, in order; only whitespace is left out.

        Memory and time per chunk do not depend on the length of the text. The last two chunks share
        what is left, so that no stub remains at the end.

        Raises:
            ValueError: if a single character takes more than `max_tokens`.
        """
        position = _skip_space(text, 0)
        density = _CHARACTERS_PER_TOKEN
        while position < len(text):
            end, density = self._room(text, position, max_tokens, density)
            end = self._fit(text, position, end, max_tokens)
            yield text[position:end].strip()
            position = _skip_space(text, end)

    def _room(self, text: str, start: int, max_tokens: int, density: float) -> tuple[int, float]:
        """Where about `max_tokens` tokens from `start` end, and the characters per token seen."""
        size = int(max_tokens * density * 2.5) + 16
        while True:
            window = text[start : start + size]
            offsets = self._tokenizer.encode(window, add_special_tokens=False).offsets
            whole = start + size >= len(text)
            if whole or len(offsets) > 2 * max_tokens:
                break
            size *= 2
        density = len(window) / max(1, len(offsets))
        if whole and len(offsets) <= max_tokens:
            return len(text), density
        share = max_tokens
        if whole and len(offsets) <= 2 * max_tokens:
            share = min(max_tokens, len(offsets) // 2 + max_tokens // 16 + 1)
        return start + max(1, offsets[share][0]), density

    def _fit(self, text: str, start: int, room: int, max_tokens: int) -> int:
        """The best end at or before `room` whose chunk really counts at most `max_tokens`.

        Tokens of a part are not the part of the tokens, hence the count and the second try.
        """
        while True:
            end = _best_end(text, start, room)
            count = self.count(text[start:end].strip())
            if count <= max_tokens:
                return end
            if end == start + 1:
                raise ValueError(f"the character {text[start]!r} alone takes {count} of {max_tokens} tokens")
            room = max(start + 1, min(end - 1, start + (end - start) * max_tokens // count))


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _best_end(text: str, start: int, room: int) -> int:
    """The most natural place in `(start, room]` to end a chunk."""
    if room >= len(text):
        return len(text)
    earliest = start + int((room - start) * _EARLIEST)
    paragraph = last_end(PARAGRAPH, text, start, room)
    if paragraph > earliest:
        return paragraph
    for pattern in (SENTENCE, LINE, _WORD):
        end = max(paragraph, last_end(pattern, text, start, room))
        if end > start:
            return end
    return _character_end(text, start, room)


def _character_end(text: str, start: int, room: int) -> int:
    """`room`, moved back so as not to part a letter from its marks or an emoji from its joiners."""
    end = room
    while end > start and (_joins(text[end]) or text[end - 1] == _JOINER):
        end -= 1
    return end if end > start else room


def _joins(character: str) -> bool:
    """Whether it belongs to the character before it: joiner, combining mark, skin tone."""
    return (
        character == _JOINER
        or unicodedata.category(character) in {"Mn", "Mc", "Me"}
        or "\U0001f3fb" <= character <= "\U0001f3ff"
    )
