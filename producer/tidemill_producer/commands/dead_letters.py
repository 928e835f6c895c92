"""The dead letters that a command was asked for; what is wrong with one hinders no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice

from tidemill.blocking import BlockingClient
from tidemill.errors import JobUnknown, TidemillError
from tidemill.exit_codes import ExitCode, exit_code
from tidemill.moves import DeadLetter
from tidemill_producer.commands.options import complain


class ChosenLetters:
    """Looks each one up when its turn comes; all that are there when the walk begins, if none is named."""

    def __init__(self, client: BlockingClient, names: Sequence[str] | None) -> None:
        self.exit_code = ExitCode.OK
        """What the letters seen so far deserve."""
        self._client = client
        self._names = names

    def __iter__(self) -> Iterator[DeadLetter]:
        return self._all() if self._names is None else self._named(self._names)

    def refuse(self, error: TidemillError, *, about: str = "") -> None:
        """Report that one of them cannot be dealt with."""
        self.exit_code = max(self.exit_code, exit_code(error))
        complain(f"{about}{error}")

    def _all(self) -> Iterator[DeadLetter]:
        """Not those that come meanwhile: a job that was requeued could be given up again, without end."""
        num_letters = self._client.depth().dead_letters
        with closing(self._client.dead_letters()) as letters:
            yield from islice(letters, num_letters)

    def _named(self, names: Sequence[str]) -> Iterator[DeadLetter]:
        for name in names:
            try:
                yield self._client.dead_letter(name)
            except JobUnknown as error:
                self.refuse(error)
