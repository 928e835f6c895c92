"""How much of a job a reader of its stream has been told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tidemill.jobs import Delta, Result


class Told:
    """Counts the pieces that were given out, and finds what the result has beyond them."""

    def __init__(self) -> None:
        self._tokens: Counter[int] = Counter()
        self._characters: Counter[int] = Counter()

    def count(self, delta: Delta) -> None:
        """Note a piece that was given out."""
        self._tokens[delta.choice] += len(delta.token_ids)
        self._characters[delta.choice] += len(delta.text)

    def rest(self, result: Result) -> Iterator[Delta]:
        """The last piece of each generation, if there is more of it than was given out."""
        for choice in result.choices:
            num_tokens = self._tokens[choice.index]
            rest = Delta(
                index=self._tokens.total(),
                choice=choice.index,
                text=choice.text[self._characters[choice.index] :],
                token_ids=choice.token_ids[num_tokens:],
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=(choice.logprobs or ())[num_tokens:],
            )
            if rest.text or rest.token_ids:
                self.count(rest)
                yield rest
