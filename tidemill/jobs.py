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
from typing import Annotated, Any, Literal, NewType, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tidemill.errors import ErrorCode, InvalidJob, JobFailed

WIRE_VERSION = 1

JobId = NewType("JobId", str)

LIMITS = frozenset({"ge", "gt", "le", "lt", "min_length", "max_length", "pattern", "expected"})
"""What pydantic calls a bound; beside them it reports the class, or the length that was met."""

NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
"""Names of result streams and tenants: short, and safe inside a Redis key."""
JOB_ID_PATTERN = r"^[A-Za-z0-9_.:-]{1,128}$"
QUEUE_PATTERN = r"^[A-Za-z0-9_.:/-]{1,128}$"

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Token = Annotated[int, Field(ge=0, strict=True)]


class Wire(BaseModel):
    """Base of everything that crosses the queue."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_wire(self) -> str:
        """The compact JSON stored in Redis; fields at their default are left out."""
        return self.model_dump_json(exclude_defaults=True)

    @classmethod
    def from_wire(cls, data: str | bytes) -> Self:
        """Inverse of `to_wire`.

        Raises:
            InvalidJob: code `undecodable`, if `data` is not such an object.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise invalid_job(error, code=ErrorCode.UNDECODABLE) from error


class Priority(StrEnum):
    """Strict order between queues of one tenant; ageing keeps `low` from starving."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class Message(Wire):
    """One turn of a chat, as OpenAI writes it."""

    role: Literal["system", "user", "assistant"]
    content: str


class SamplingParams(Wire):
    """How tokens are chosen and when to stop. Names and meanings are vLLM's and OpenAI's."""

    max_tokens: int = Field(default=256, ge=1, strict=True)
    """Tokens to generate at most; the worker also holds it to the model's context."""
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    """0 is greedy."""
    top_k: int = Field(default=0, ge=-1, strict=True)
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose probability reaches this."""
    seed: int | None = Field(default=None, ge=0, lt=2**63, strict=True)
    """Keys the noise. If absent it is drawn once, at submission, so that a resumed job goes on
    with the same numbers."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=16)
    """Generation ends before the first of these strings; it is not part of the text."""
    stop_token_ids: tuple[Token, ...] = Field(default=(), max_length=64)
    """Generation ends after any of these tokens; its text is left out."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text tokens; for benchmarks."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class Job(Wire):
    """One piece of work: exactly one of `prompt`, `messages` and `prompt_token_ids`."""

    id: JobId = Field(default_factory=lambda: JobId(uuid.uuid4().hex), pattern=JOB_ID_PATTERN)
    model: str | None = None
    """The model this job was written for; `None` takes what the queue serves."""
    prompt: str | None = Field(default=None, min_length=1)
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)
    prompt_token_ids: tuple[Token, ...] | None = Field(default=None, min_length=1)
    params: SamplingParams = SamplingParams()
    priority: Priority = Priority.NORMAL
    tenant: Name = "default"
    deadline: float | None = Field(default=None, gt=0.0)
    """Seconds from submission after which the answer is worthless."""
    metadata: Mapping[str, str] = Field(default_factory=dict, max_length=16)
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

        Computed over canonical JSON, so that two spellings of one job are one job.
        """
        content = self.model_dump(
            mode="json",
            include={"model", "prompt", "messages", "prompt_token_ids", "params"},
            exclude_defaults=True,
        )
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
    """Why a generation stopped by itself."""

    STOP = "stop"
    LENGTH = "length"


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
    """From the claim to the first scheduled token."""
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
    usage: Usage = Usage()
    timings: Timings = Timings()
    attempts: int = 0
    worker: str | None = None
    metadata: Mapping[str, str] = Field(default_factory=dict)
    error: ErrorInfo | None = None

    def raise_for_status(self) -> Self:
        """Return self if the job succeeded.

        Raises:
            JobFailed: otherwise.
        """
        if self.status is not Status.SUCCEEDED:
            raise JobFailed(self)
        return self


class Delta(Wire):
    """A piece of a streamed generation; the pieces in order are the whole text, once."""

    index: int = Field(ge=0)
    """Position of the first of `token_ids` in the generation."""
    text: str = ""
    token_ids: tuple[int, ...] = ()


def invalid_job(error: ValidationError, *, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> InvalidJob:
    """Turn pydantic's report into one line that names the field and its limit."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or None
    limit = next((value for key, value in first.get("ctx", {}).items() if key in LIMITS), None)
    reason = first["msg"].removeprefix("Value error, ")
    message = f"{field}: {reason}" if field else reason
    return InvalidJob(
        message, field=field, limit=limit if isinstance(limit, int | float | str) else None, code=code
    )
