"""From generated tokens to text that may be shown: whole characters, stopped at stop strings.

Each token costs the same, however long the output is. What `take()` and `close()` return, put
together, is the text of all tokens behind the prompt, up to the stop string that completed first,
and does not depend on when they were called.
"""

from __future__ import annotations

from typing import Protocol

from tidemill.params import SamplingParams


class Decoder(Protocol):
    """Turns tokens into text one by one; holds back what a later token may still change."""

    @property
    def prompt_text(self) -> str:
        """Text in front of the first token; settled once there is text of the output."""
        ...

    def push(self, token_id: int) -> str:
        """Take one token, return the text that has become final."""
        ...

    def flush(self) -> str:
        """Return what is still held back; nothing is pushed afterwards."""
        ...


class StopMatcher:
    """One stop string, matched a character at a time (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Characters of `stop` that the text so far ends with."""
        self._fallback = _borders(stop)

    def push(self, text: str) -> int | None:
        """Take more text up to the first end of the stop string in it; return where that is."""
        if not self.matched and self.stop[0] not in text:
            return None
        for end, character in enumerate(text, 1):
            while self.matched and character != self.stop[self.matched]:
                self.matched = self._fallback[self.matched - 1]
            if character == self.stop[self.matched]:
                self.matched += 1
            if self.matched == len(self.stop):
                self.matched = self._fallback[-1]
                return end
        return None

    def skip(self, text: str) -> None:
        """Take more text in which the stop string may be complete without stopping anything."""
        while (end := self.push(text)) is not None:
            text = text[end:]


class StoppedText:
    """The engine's `OutputText`: a token decoder followed by stop strings with hold-back.

    A stop string counts if its last character comes with a token behind the first `min_tokens`, even
    if it began before (vLLM's rule). Of several, the one that is complete first wins, of those
    complete at the same character the longest. Neither an echoed prompt nor U+FFFD for a character
    left unfinished at the end is searched for them.
    """

    def __init__(self, decoder: Decoder, params: SamplingParams) -> None:
        self._decoder = decoder
        self._matchers = [StopMatcher(string) for string in params.stop]
        self._ignored_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._echoes = params.echo
        self._text = ""
        self._stopped: str | None = None

    def append(self, token_id: int) -> str | None:
        """Take one generated token.

        Returns:
            The stop string that it completed, if any. The text ends there; tokens appended later
            change nothing.
        """
        if self._stopped is not None:
            return self._stopped
        self._ignored_tokens -= 1
        text = self._decoder.push(token_id)
        if text:
            self._add(text)
            self._search(text)
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
        if self._echoes:
            text = self._decoder.prompt_text + text
            self._echoes = False
        self._text += text

    def _search(self, text: str) -> None:
        """Look for stop strings that end in `text`, the last that was added."""
        if self._ignored_tokens >= 0:
            for matcher in self._matchers:
                matcher.skip(text)
            return
        ends = [(matcher.push(text), matcher.stop) for matcher in self._matchers]
        found = [(end, -len(stop), stop) for end, stop in ends if end is not None]
        if found:
            end, _, self._stopped = min(found)
            surplus = len(text) - end + (0 if self._includes_stop else len(self._stopped))
            self._text = self._text[: len(self._text) - surplus]


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
