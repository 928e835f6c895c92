"""A request on its way through the engine, and each of its generations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tidemill.params import SamplingParams
from tidemill_scheduler import Sequence as ScheduledSequence
from tidemill_scheduler import SequenceId
from tidemill_worker.request import OpenChoice, Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RankedToken(Protocol):
    """One token among all that could have stood in its place."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int:
        """1 for the most likely."""

    @property
    def top(self) -> Sequence[tuple[int, float]]:
        """(token, logprob) of the most likely ones, as many as were asked for."""


@dataclass(frozen=True)
class Marks:
    """When a request reached each stage, in seconds of the engine's clock."""

    added: float
    scheduled: float
    first_token: float
    finished: float


@dataclass
class OpenRequest:
    """A request of which at least one generation goes on."""

    request: Request
    added: float
    generations: dict[SequenceId, Generation] = field(default_factory=dict)
    """Those that go on."""
    prompt_logprobs: list[RankedToken] = field(default_factory=list)
    """Of the prompt's second token and those after it, as far as they are computed."""
    num_cached_tokens: int = 0
    first_token: float | None = None

    def marks(self, now: float) -> Marks | None:
        """The stages, `now` being the last of them; `None` if it ends before it was begun."""
        if self.request.scheduled is None:
            return None
        return Marks(
            added=self.added,
            scheduled=self.request.scheduled,
            first_token=now if self.first_token is None else self.first_token,
            finished=now,
        )


@dataclass
class Generation:
    """One sequence of tokens, as the runner and the sampler see it."""

    owner: OpenRequest
    sequence: ScheduledSequence
    open_choice: OpenChoice | None
    """`None` if the sequence is here for the prompt's logprobs alone."""
    end_tokens: Collection[int]
    """Tokens that may not come before `min_tokens`."""
    computes_prompt: bool = False
    """Whether it is the one of its request that reports the prompt's logprobs."""
    sampler_state: object | None = None
    """Whatever the sampler wants to remember; it can be rebuilt from `token_ids`."""

    @property
    def token_ids(self) -> Sequence[int]:
        return self.sequence.token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequence.num_prompt_tokens

    @property
    def params(self) -> SamplingParams:
        return self.owner.request.params

    @property
    def seed(self) -> int:
        return self.owner.request.seed

    @property
    def choice(self) -> int:
        return 0 if self.open_choice is None else self.open_choice.index

    @property
    def bad_words(self) -> Sequence[Sequence[int]]:
        return self.owner.request.bad_words

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many most likely tokens to report for each prompt token; `None` to report nothing."""
        return self.params.prompt_logprobs if self.computes_prompt else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.sequence.token_ids) - self.sequence.num_prompt_tokens

    def allowed_tokens(self) -> NDArray[np.uint32] | None:
        """What the grammar lets come next (see `Grammar`); `None` if there is no grammar."""
        if self.open_choice is None or self.open_choice.grammar is None:
            return None
        return self.open_choice.grammar.allowed_tokens()
