"""What the engine is asked for: one prompt, and the generations that go on from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidemill.jobs import FinishReason
from tidemill.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class OutputText(Protocol):
    """Turns generated tokens into text, holding back what may still change."""

    def append(self, token_id: int) -> str | None:
        """Take one generated token; return the stop string it completed, if any."""

    def take(self) -> str:
        """Text not handed out yet that can no longer change."""

    def close(self) -> str:
        """Everything left, at the end of the generation."""


class Grammar(Protocol):
    """Where one generation stands in what its text must be."""

    def accept(self, token_id: int) -> None:
        """Take in a generated token; what may follow it is worked out by another thread meanwhile."""

    def allowed_tokens(self) -> NDArray[np.uint32]:
        """Bit `i % 32` of word `i // 32` says whether token `i` may come next; waits for that thread."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end of the text can follow."""

    @property
    def error(self) -> str | None:
        """Why the text cannot be finished any more; nothing is allowed then."""


@dataclass
class OpenChoice:
    """One generation to be made, or gone on with.

    One that an earlier attempt began brings its tokens in `output_token_ids`, already replayed
    through `output_text` and `grammar`.
    """

    index: int
    output_text: OutputText
    grammar: Grammar | None = None
    output_token_ids: Sequence[int] = ()


@dataclass
class Request:
    """A prompt and the generations that the engine has been asked for.

    There may be none to make: then only the prompt's logprobs are wanted, for a job whose
    generations an earlier attempt had finished.
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    choices: Sequence[OpenChoice]
    bad_words: Sequence[Sequence[int]] = ()
    """What `params.bad_words` are in tokens."""
    priority: int = 1
    salt: bytes = b""
    deadline: float | None = None
    """When the answer becomes worthless, in seconds of the engine's clock."""
    scheduled: float | None = None
    """When the engine began to compute it, by that clock. The engine sets it; other threads may look."""


@dataclass(frozen=True)
class Ending:
    """Why a generation is complete; `stop_reason` is the stop string or token, if it was one."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None


def ignores_end_of_text(params: SamplingParams, grammar: Grammar | None) -> bool:
    """Whether the model's end of text is a token like any other; a grammar's end always ends it."""
    return params.ignore_eos and grammar is None


def ending_after(
    token: int,
    num_output_tokens: int,
    params: SamplingParams,
    end_of_text: frozenset[int],
    choice: OpenChoice,
) -> Ending | None:
    """Take in one generated token, the `num_output_tokens`-th; say whether it is the last, and why.

    A token that ends the generation by itself leaves no text, unless `include_stop_str_in_output`;
    all others go to the choice's `output_text` and `grammar`.
    """
    is_end = token in end_of_text and not ignores_end_of_text(params, choice.grammar)
    if is_end or token in params.stop_token_ids:
        if params.include_stop_str_in_output:
            choice.output_text.append(token)
        return Ending(FinishReason.STOP, token if token in params.stop_token_ids else None)
    stop_string = choice.output_text.append(token)
    if stop_string is not None:
        return Ending(FinishReason.STOP, stop_string)
    if choice.grammar is not None:
        choice.grammar.accept(token)
        if choice.grammar.is_complete:
            return Ending(FinishReason.STOP)
    if num_output_tokens >= params.max_tokens:
        return Ending(FinishReason.LENGTH)
    return None
