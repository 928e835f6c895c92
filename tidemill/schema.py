"""What everything that crosses the queue has in common: frozen pydantic models, and how they refuse."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidemill.errors import ErrorCode, InvalidJob

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
