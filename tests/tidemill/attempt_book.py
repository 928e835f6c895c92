"""What the attempts at each job must have come to, kept beside the queue that counts them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.tidemill.factories import text_of
from tidemill.moves import Claimed, DeltaPage


@dataclass
class Attempts:
    """Follows one job from holder to holder.

    What one build generated, the next attempt of that build goes on from; one of another build begins
    anew. An attempt whose lease lapses has failed, unless it got further or had not begun yet. What failed
    alone is buried; whether it is run alone depends on how many attempts its worker allows.
    """

    failures: int = 0
    tokens: int = 0
    """Checkpointed, of the present generation."""
    _base: int = 0
    _fingerprint: str = ""
    _restarted: bool = False
    _alone: bool = False
    _held_aside: bool = False
    are_used_up: bool = False
    """It was buried."""

    def hand_over(self, job: Claimed, fingerprint: str, max_attempts: int) -> None:
        """A worker of this build, which allows so many attempts, was given the job."""
        if self._is_foreign(fingerprint):
            self.tokens, self._restarted = 0, True
        self._base, self._fingerprint = self.tokens, fingerprint
        self._alone = self._held_aside = job.alone
        assert not self.are_used_up
        assert job.failures == self.failures
        assert job.alone is (self.failures >= max_attempts - 1)
        assert "".join(delta.text for delta in job.checkpoint) == text_of(0, self.tokens)

    def begin(self) -> None:
        """The holder runs it now."""
        self._held_aside = False

    def lapse(self, fingerprint: str) -> None:
        """The holder was lost, as a worker of this build found."""
        voided_again = self._restarted and self._is_foreign(fingerprint)
        advanced = self.tokens > self._base and not voided_again
        if not self._held_aside and not advanced:
            self.failures += 1
            self.are_used_up = self._alone

    def _is_foreign(self, fingerprint: str) -> bool:
        return self.tokens > 0 and fingerprint != self._fingerprint


@dataclass
class Reader:
    """Somebody who reads a job's generation along, and believes what it is told."""

    cursor: str = "0"
    text: str = ""

    def take(self, page: DeltaPage) -> bool:
        """Read a page; false if it had nothing new."""
        for delta in page.deltas:
            self.text = delta.text if delta.restart else self.text + delta.text
        before, self.cursor = self.cursor, page.cursor
        return page.cursor != before
