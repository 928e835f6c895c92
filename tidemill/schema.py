"""What everything that crosses the queue has in common: frozen pydantic models, and how they refuse."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from tidemill.errors import ConfigurationError, ErrorCode, InvalidJob

LIMITS = frozenset({"ge", "gt", "le", "lt", "min_length", "max_length", "pattern", "expected"})
"""What pydantic calls a bound; beside them it reports the class, or the length that was met."""

NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
"""Names of result streams and tenants: short, and safe inside a Redis key."""
JOB_ID_PATTERN = r"^[A-Za-z0-9_.:-]{1,128}$"
QUEUE_PATTERN = r"^[A-Za-z0-9_.:/-]{1,128}$"


def check_name(what: str, name: str, pattern: str) -> str:
    """Return `name`, which becomes part of keys, where patterns and other commands would misread odd ones.

    Raises:
        ConfigurationError: naming `what`, and the pattern that it must match.
    """
    if re.fullmatch(pattern, name) is None:
        raise ConfigurationError(f"{what}: {name!r} is not a name; it must match {pattern}")
    return name


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not Unicode text: half of a surrogate pair at {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""Text of any length; pydantic itself lets pass what no JSON can say, unless the length is bounded."""
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
    """Turn pydantic's report into one line that names the field and its limit.

    pydantic places a check of a whole object at that object; the field it means is `field` of its context.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    place = (*first["loc"], context["field"]) if "field" in context else first["loc"]
    field = ".".join(str(part) for part in place) or None
    limit = next((value for key, value in context.items() if key in LIMITS), None)
    reason = _in_words_of_json(first)
    message = f"{field}: {reason}" if field else reason
    return InvalidJob(
        message, field=field, limit=limit if isinstance(limit, int | float | str) else None, code=code
    )


def _in_words_of_json(error: ErrorDetails) -> str:
    match error["type"]:
        case "tuple_type":
            return "Input should be a valid list"
        case "model_type":
            return "Input should be a valid object"
        case "too_long" | "too_short":
            return re.sub("^Tuple", "List", error["msg"]).replace(" after validation", "")
    return error["msg"].removeprefix("Value error, ")
