"""How far one generation of a held job has come, and what of it no checkpoint has yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tidemill.jobs import Delta
from tidemill_worker.generation import RankedToken
from tidemill_worker.request import Ending
from tidemill_worker.token_logprobs import TokenText, logprob_bytes, on_wire

TOKEN_BYTES = 6
"""What a result's JSON takes for a token: about."""


@dataclass(eq=False)
class Piece:
    """Tokens that go into a checkpoint together."""

    index: int
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[RankedToken, ...]
    ending: Ending | None
    """Why the generation ends with them, if it does."""
    _delta: Delta | None = None

    def delta(self, token_text: TokenText) -> Delta:
        """The piece as it is stored: made once, because many logprobs take milliseconds."""
        self._delta = self._delta or Delta(
            index=self.index,
            choice=self.choice,
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=None if self.ending is None else self.ending.finish_reason,
            stop_reason=None if self.ending is None else self.ending.stop_reason,
            logprobs=on_wire(self.logprobs, token_text),
        )
        return self._delta


@dataclass(eq=False)
class HeldChoice:
    """One of the generations of a job, from its first token on, whichever attempt drew it."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RankedToken] = field(default_factory=list)
    """One for each of `token_ids`, if they were asked for."""
    ending: Ending | None = None
    """Why it is complete, if it is."""
    last_token: float | None = None
    """When this attempt drew its last token so far, by the clock of who looks at it."""
    num_sealed_tokens: int = 0
    """Those that some checkpoint has."""
    _texts: list[str] = field(default_factory=list)
    _num_sealed_texts: int = 0
    _num_chars: int = 0

    @property
    def text(self) -> str:
        """The text of `token_ids` that is safe to show."""
        return "".join(self._texts)

    @property
    def result_bytes(self) -> int:
        """About what it takes in a result's JSON."""
        return self._num_chars + TOKEN_BYTES * len(self.token_ids) + logprob_bytes(self.logprobs)

    @property
    def has_news(self) -> bool:
        """Whether there are tokens that no checkpoint has."""
        return self.num_sealed_tokens < len(self.token_ids)

    def resume(self, token_ids: Sequence[int], text: str, logprobs: Sequence[RankedToken]) -> None:
        """Start from what an earlier attempt generated, which is stored already.

        Text without a token, the prompt's that is echoed, is not: it is stored with the first token.
        """
        self.num_sealed_tokens = len(token_ids)
        self._num_sealed_texts = 1 if text and token_ids else 0
        self.extend(token_ids, text, logprobs)

    def extend(self, token_ids: Iterable[int], text: str, logprobs: Iterable[RankedToken] = ()) -> None:
        """Add what one step brought."""
        self.logprobs.extend(logprobs)
        if text:
            self._texts.append(text)
            self._num_chars += len(text)
        self.token_ids.extend(token_ids)

    def seal(self, index: int) -> Piece:
        """What no checkpoint has; in the stream of the job it stands behind `index` tokens."""
        first, first_text = self.num_sealed_tokens, self._num_sealed_texts
        self.num_sealed_tokens, self._num_sealed_texts = len(self.token_ids), len(self._texts)
        return Piece(
            index,
            self.index,
            "".join(self._texts[first_text:]),
            tuple(self.token_ids[first:]),
            tuple(self.logprobs[first:]),
            self.ending,
        )
