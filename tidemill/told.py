"""How much of a job a reader of its stream has been told."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from tidemill.jobs import Choice, Delta, Result, Status


class Told:
    """Remembers the pieces that were given out, and finds what the result has beyond them."""

    def __init__(self) -> None:
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)
        self._characters: Counter[int] = Counter()
        self._num_tokens = 0
        self._is_void = False

    def take(self, delta: Delta) -> bool:
        """Note a piece that is to be given out; one with `restart` makes void what was told before.

        False, and nothing is noted, if it does not go on where the last one ended: the server has lost
        what came between, or repeats what was told. The result has the whole.
        """
        self._is_void |= delta.restart
        if delta.restart and delta.index == 0:
            self._forget()
        if self._is_void or delta.index != self._num_tokens:
            return False
        self._tokens[delta.choice] += delta.token_ids
        self._characters[delta.choice] += len(delta.text)
        self._num_tokens += len(delta.token_ids)
        return True

    def begin_anew(self) -> None:
        """Note that what was told is void, and that no piece has said so yet."""
        self._is_void = True

    def rest(self, result: Result) -> Iterator[Delta]:
        """The last piece of each generation, if there is more of it than was given out.

        If what was given out is void, or not how the result begins, the result is told from its
        beginning; one that has nothing to tell, as an empty piece that says `restart`.
        """
        restart = False
        if self._is_void or not self._is_beginning_of(result):
            restart = bool(self._tokens)
            self._forget()
        for choice in result.choices:
            told = len(self._tokens[choice.index])
            rest = Delta(
                index=self._num_tokens,
                choice=choice.index,
                text=choice.text[self._characters[choice.index] :],
                token_ids=choice.token_ids[told:],
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=(choice.logprobs or ())[told:],
                restart=restart,
            )
            if rest.text or rest.token_ids:
                self.take(rest)
                restart = False
                yield rest
        if restart:
            yield Delta(index=0, restart=True)

    def _is_beginning_of(self, result: Result) -> bool:
        """A job that failed before there was any result leaves generations that contradict nothing."""
        return all(
            self._begins(choice)
            for choice in result.choices
            if choice.token_ids or result.status is Status.SUCCEEDED
        )

    def _begins(self, choice: Choice) -> bool:
        told = self._tokens.get(choice.index, [])
        has_text = len(choice.text) >= self._characters[choice.index]
        return has_text and (not choice.token_ids or list(choice.token_ids[: len(told)]) == told)

    def _forget(self) -> None:
        self._tokens.clear()
        self._characters.clear()
        self._num_tokens = 0
        self._is_void = False
