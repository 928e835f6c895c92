"""From generated tokens to text that may be shown: whole characters, stopped at stop strings.

Each token costs the same, however long the output is. What `take()` and `close()` return, put
together, is the tokenizer's own decoding of all tokens (without special ones), cut before the stop
string that completed first, and does not depend on when they were called.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class TokenDecoder(Protocol):
    """Turns tokens into text one by one; holds back what a later token may still change."""

    def push(self, token_id: int) -> str:
        """Take one token, return the text that has become final."""
        ...

    def flush(self) -> str:
        """Return what is still held back; nothing is pushed afterwards."""
        ...


class ByteLevelDecoder:
    """For byte-level vocabularies, where a token is a run of UTF-8 bytes.

    Python's incremental decoder replaces the same maximal subparts with U+FFFD as the Rust one
    behind the tokenizer does, so that invalid sequences agree too.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For every other vocabulary: decodes the new tokens behind the last one already shown.

    That token gives the context which decides about spaces. Byte tokens (`<0xE2>`) are held until
    their run ends, because one invalid byte changes how the whole run reads; this is why a decoder
    that shows a character as soon as it is complete meets text that no longer starts with what it
    has shown (vllm#17448).
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        hidden: Callable[[int], bool],
        is_byte: Callable[[int], bool],
    ) -> None:
        self._decode = decode
        self._hidden = hidden
        self._is_byte = is_byte
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if self._hidden(token_id):
            return ""
        self._pending.append(token_id)
        return "" if self._is_byte(token_id) else self._release()

    def flush(self) -> str:
        return self._release() if self._pending else ""

    def _release(self) -> str:
        text = self._decode(self._context + self._pending)[len(self._context_text) :]
        self._context = self._pending[-1:]
        self._context_text = self._decode(self._context)
        self._pending = []
        return text


class StopMatcher:
    """One stop string, matched a character at a time (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Characters of `stop` that the text so far ends with."""
        self._fallback = _borders(stop)

    def push(self, character: str) -> bool:
        """Take one character; say whether it completed the stop string."""
        while self.matched and character != self.stop[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        if character == self.stop[self.matched]:
            self.matched += 1
        return self.matched == len(self.stop)


class StoppedText:
    """The engine's `OutputText`: a token decoder followed by stop strings with hold-back."""

    def __init__(self, decoder: TokenDecoder, stop: Iterable[str] = ()) -> None:
        self._decoder = decoder
        self._matchers = [StopMatcher(string) for string in stop]
        self._text = ""
        self._stopped: str | None = None

    def append(self, token_id: int) -> str | None:
        """Take one generated token.

        Returns:
            The stop string that it completed, if any. The text ends before that string; tokens
            appended later change nothing.
        """
        if self._stopped is None:
            self._add(self._decoder.push(token_id))
        return self._stopped

    def take(self) -> str:
        """Text not handed out yet that no later token can change or turn into a stop string."""
        held = 0
        if self._stopped is None:
            held = max((matcher.matched for matcher in self._matchers), default=0)
        end = len(self._text) - held
        text, self._text = self._text[:end], self._text[end:]
        return text

    def close(self) -> str:
        """Everything not handed out yet; the generation is over."""
        if self._stopped is None:
            self._add(self._decoder.flush())
        text, self._text = self._text, ""
        return text

    def _add(self, text: str) -> None:
        if not self._matchers:
            self._text += text
            return
        for position, character in enumerate(text):
            completed = [m.stop for m in self._matchers if m.push(character)]
            if completed:
                self._stopped = max(completed, key=len)
                so_far = self._text + text[: position + 1]
                self._text = so_far[: len(so_far) - len(self._stopped)]
                return
        self._text += text


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        if string[index] == string[length]:
            length += 1
        borders[index] = length
    return borders
