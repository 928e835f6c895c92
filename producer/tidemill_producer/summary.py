"""What a summary is asked to be, and what comes of a document."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.card import ModelCard
from tidemill.errors import ConfigurationError, TidemillError
from tidemill.jobs import Priority, Result

SYSTEM = (
    "Provide a concise, objective summary of the input text in up to three sentences, focusing on key "
    "actions and intentions without using second or third person pronouns."
)
"""What SmolLM2 was taught to summarize with (the system message of its training data)."""
INSTRUCTION = "Summarize the following text in a few sentences."
"""Said once more right before the text, without which the smallest models go on writing the text."""
DEFAULT_CHUNK_TOKENS = 800
"""Small models lose the thread of longer inputs, and shorter ones say too little to summarize."""
MIN_CHUNK_TOKENS = 32
JOINT_TOKENS = 16
"""Kept free for what the chat template puts around a second message, and for where parts meet."""


@dataclass(frozen=True, slots=True)
class SummaryOptions:
    """What a summary should be like. All of it but `priority` is part of the ids of its jobs.

    Raises:
        ConfigurationError: naming the option and its limit.
    """

    max_tokens: int = 128
    """Length of a summary, in tokens."""
    chunk_tokens: int | None = None
    """Tokens of a document per job; `None` suits small models, and what the worker can hold."""
    system: str = SYSTEM
    """The system message."""
    instruction: str = INSTRUCTION
    """What the user's message begins with, before the text."""
    temperature: float = 0.0
    markup: bool = False
    """Whether the model sees markup, links and code blocks too, or the prose only."""
    tenant: str = "default"
    priority: Priority = Priority.NORMAL
    scope: str = ""
    """Answers are shared with runs of the same scope only."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.chunk_tokens is not None and self.chunk_tokens < MIN_CHUNK_TOKENS:
            raise ConfigurationError(
                f"chunk_tokens must be at least {MIN_CHUNK_TOKENS}, got {self.chunk_tokens}"
            )
        for name in ("system", "instruction"):
            if not getattr(self, name).strip():
                raise ConfigurationError(f"{name} must not be empty")

    def fit(self, card: ModelCard, *, instruction_tokens: int) -> int:
        """Tokens of text that go into one job for the model that `card` describes.

        Raises:
            ConfigurationError: too few for the reduction: two summaries must fit one job.
        """
        context = min(card.max_model_len, card.max_total_tokens)
        taken = self.max_tokens + card.chat_template_overhead + instruction_tokens + JOINT_TOKENS
        room = context - taken
        least = max(MIN_CHUNK_TOKENS, 2 * self.max_tokens + JOINT_TOKENS)
        if room < least:
            raise ConfigurationError(
                f"max_tokens of {self.max_tokens} leaves {room} of the {context} tokens of {card.model}"
                f" for text, and two summaries take {least}"
            )
        if self.chunk_tokens is None:
            return min(room, max(DEFAULT_CHUNK_TOKENS, least))
        if not least <= self.chunk_tokens <= room:
            raise ConfigurationError(
                f"chunk_tokens must be from {least} to {room} with {card.model} and max_tokens of"
                f" {self.max_tokens}, got {self.chunk_tokens}"
            )
        return self.chunk_tokens


@dataclass(slots=True)
class Tally:
    """What it took, for one document or for all."""

    chunks: int = 0
    jobs: int = 0
    reused_jobs: int = 0
    """Jobs that an earlier run had asked for already."""
    reused_tokens: int = 0
    """Tokens that were generated for those."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def count(self, result: Result, *, reused: bool) -> None:
        """Add one answer."""
        self.jobs += 1
        self.prompt_tokens += result.usage.prompt_tokens
        self.completion_tokens += result.usage.completion_tokens
        self.cached_tokens += result.usage.cached_tokens
        if reused:
            self.reused_jobs += 1
            self.reused_tokens += result.usage.completion_tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one document, and what it took."""

    name: str
    text: str
    tally: Tally


@dataclass(frozen=True, slots=True)
class Failure:
    """A document without a summary, and why."""

    name: str
    reason: str


class SummaryFailed(TidemillError):
    """A job of this document ended without a text; the message says which, and why."""
