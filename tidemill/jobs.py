"""The contract both sides speak: what a producer asks for and what it is answered with.

All models are frozen and refuse unknown fields. `WIRE_VERSION` travels beside the payload, not in
it, and rises only when an older worker would misread a job; such a worker leaves the job for a
newer one.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, NewType, Self

from pydantic import Field, ValidationError, model_validator

from tidemill.errors import ErrorCode, InvalidJob, JobFailed
from tidemill.params import SamplingParams
from tidemill.schema import JOB_ID_PATTERN, Name, Text, Token, Wire, invalid_job

WIRE_VERSION = 1

JobId = NewType("JobId", str)


class Priority(StrEnum):
    """Strict order between queues of one tenant; ageing keeps `low` from starving."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class Message(Wire):
    """One turn of a chat, as OpenAI writes it."""

    role: Literal["system", "user", "assistant"]
    content: Text


class Job(Wire):
    """One piece of work: exactly one of `prompt`, `messages` and `prompt_token_ids`."""

    id: JobId = Field(default_factory=lambda: JobId(uuid.uuid4().hex), pattern=JOB_ID_PATTERN)
    model: Text | None = None
    """The model this job was written for; `None` takes what the queue serves."""
    prompt: str | None = Field(default=None, min_length=1)
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)
    prompt_token_ids: tuple[Token, ...] | None = Field(default=None, min_length=1)
    params: SamplingParams = SamplingParams()
    priority: Priority = Priority.NORMAL
    tenant: Name = "default"
    deadline: float | None = Field(default=None, gt=0.0)
    """Seconds from submission after which the answer is worthless."""
    metadata: Mapping[Text, Text] = Field(default_factory=dict, max_length=16)
    """Comes back with the result, untouched."""
    stream: bool = False
    """Publish text as it is generated; read it with `Client.stream`."""
    reply_to: Name | None = None
    """Result stream to answer on; `None` is the submitting client's own."""

    @model_validator(mode="after")
    def _exactly_one_input(self) -> Self:
        given = [f for f in ("prompt", "messages", "prompt_token_ids") if getattr(self, f) is not None]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of prompt, messages, prompt_token_ids; got " + (", ".join(given) or "none")
            )
        return self

    def digest(self) -> str:
        """Identifies the work itself (hex, 128 bits): id, delivery and scheduling do not count.

        Computed over canonical JSON, so that two spellings of one job are one job. A schema counts as
        it is written: the order of its properties is that of the text.
        """
        content = self.model_dump(
            mode="json",
            include={"model", "prompt", "messages", "prompt_token_ids", "params"},
            exclude_defaults=True,
        )
        outputs = self.params.structured_outputs
        if outputs is not None and outputs.json_schema is not None:
            content["params"]["structured_outputs"] = {"json": json.dumps(outputs.json_schema)}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Build a job from outside data.

        Raises:
            InvalidJob: naming the first field that is wrong, and its limit.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise invalid_job(error) from error


class Status(StrEnum):
    """How a job ended. Exactly one of these is recorded per job."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class FinishReason(StrEnum):
    """Why a generation went no further; the last three say how the job ended instead."""

    STOP = "stop"
    """At the end of the text: by the model, a stop string, a stop token or a finished grammar."""
    LENGTH = "length"
    """At `max_tokens`."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


class Usage(Wire):
    """What the job cost, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache instead of being computed."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Timings(Wire):
    """Seconds spent in each stage of the attempt that finished the job."""

    queued: float | None = None
    """From submission to the claim, by Redis's clock."""
    waiting: float | None = None
    """From the claim to the first scheduled token; `None` if the job ended before there was one."""
    prefill: float | None = None
    """From the first scheduled token to the first generated one."""
    decode: float | None = None
    """From the first generated token to the last."""


class ErrorInfo(Wire):
    """Why a job has no generation."""

    code: ErrorCode
    message: str
    field: str | None = None
    limit: int | float | str | None = None

    @classmethod
    def of(cls, error: InvalidJob) -> Self:
        """What a refusal says, as part of a result."""
        return cls(code=error.code, message=str(error), field=error.field, limit=error.limit)


class Logprob(Wire):
    """How likely the model held one token to be, whatever the job's parameters then made of it."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability, from the model's own logits."""
    rank: int
    """1 for the most likely token."""
    token: str = ""
    """Its text alone."""
    bytes: tuple[int, ...] | None = None
    """What it stands for, where that alone is not whole UTF-8."""


class TokenLogprobs(Logprob):
    """The token that stands at one position, and the most likely ones there."""

    top: tuple[Logprob, ...] = ()
    """As many as were asked for, most likely first."""


class Choice(Wire):
    """One of the generations of a job."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Result(Wire):
    """The one answer to a job."""

    id: JobId
    status: Status
    model: str | None = None
    text: str = ""
    """For a job that was cancelled or expired in mid-generation: what there was of it."""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the generation; `None` for end of text."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each token of the prompt, if they were asked for; none for the first, which follows on
    nothing."""
    alternatives: tuple[Choice, ...] = ()
    """The other generations of a job with `n` above 1; `choices` has all of them."""
    usage: Usage = Usage()
    timings: Timings = Timings()
    attempts: int = 0
    worker: str | None = None
    metadata: Mapping[str, str] = Field(default_factory=dict)
    error: ErrorInfo | None = None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All generations of the job, `n` of them; the first is also what `text` and so on hold."""
        first = Choice(
            index=0,
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs,
        )
        return (first, *self.alternatives)

    def raise_for_status(self) -> Self:
        """Return self if the job succeeded.

        Raises:
            JobFailed: otherwise.
        """
        if self.status is not Status.SUCCEEDED:
            raise JobFailed(self)
        return self


class Delta(Wire):
    """A piece of a streamed job; a choice's pieces in order are its whole text, once."""

    index: int = Field(ge=0)
    """Tokens of the job before this piece, over all its choices: its place in the stream."""
    choice: int = Field(default=0, ge=0)
    """Which of the job's generations it belongs to."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    """Why the generation ends with this piece; `None` if it goes on, or was cut short after it."""
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, if they were asked for."""
    restart: bool = False
    """The generations began anew on a worker of another build; what was streamed of this job before
    is void."""
