"""Who asks for what, and when: drawn from distributions, or read from a file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from workload import LogNormal

MAX_TOKENS = 1 << 20
"""Of one prompt or output; a prompt's token ids have that much room of their own."""

Count = Annotated[int, Field(ge=1, le=MAX_TOKENS, strict=True)]


class Strict(BaseModel):
    """Frozen, and nothing in it goes unread."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SharedPrefix(Strict):
    """The beginning that all prompts of one group have in common."""

    group: str | int
    tokens: Count


class TracedRequest(Strict):
    """One request: when it comes, and how long its prompt and its output are."""

    arrival: Annotated[FiniteFloat, Field(ge=0.0)]
    """Seconds from the start."""
    prompt_tokens: Count
    output_tokens: Count
    priority: Annotated[int, Field(ge=0, le=2, strict=True)] = 1
    """High 0, normal 1, low 2."""
    tenant: str = ""
    """Prefixes are shared within a tenant only."""
    prefix: SharedPrefix | None = None

    @model_validator(mode="after")
    def _prefix_lies_in_the_prompt(self) -> Self:
        if self.prefix is not None and self.prefix.tokens > self.prompt_tokens:
            raise ValueError(
                f"prefix.tokens is {self.prefix.tokens}, at most prompt_tokens, {self.prompt_tokens}"
            )
        return self


def draw_trace(
    count: int,
    *,
    prompts: LogNormal,
    outputs: LogNormal,
    arrivals: Literal["burst", "poisson"] = "burst",
    rate: float = 1.0,
    seed: int = 0,
) -> list[TracedRequest]:
    """Draw a trace, the same for the same seed.

    Args:
        count: how many requests.
        prompts: lengths of the prompts, in tokens.
        outputs: lengths of the outputs, in tokens.
        arrivals: all at once, or one by one at random.
        rate: requests per second on average, if they come one by one.
        seed: of all that is drawn.

    Raises:
        ValueError: if `rate` is not above 0.
    """
    if rate <= 0.0:
        raise ValueError(f"rate is {rate}, must be above 0 requests per second")
    dice = random.Random(seed)
    trace, now = [], 0.0
    for _ in range(count):
        now += dice.expovariate(rate) if arrivals == "poisson" else 0.0
        request = TracedRequest(
            arrival=now, prompt_tokens=prompts.draw(dice), output_tokens=outputs.draw(dice)
        )
        trace.append(request)
    return trace


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a trace, one JSON object a line, and put it in the order of arrival.

    Raises:
        ValueError: naming line and field.
    """
    return sorted(_read_lines(path), key=lambda request: request.arrival)


def _read_lines(path: Path) -> Iterator[TracedRequest]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield TracedRequest.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(map(str, first["loc"])) or "request"
                raise ValueError(f"{path}, line {number}: {field}: {first['msg']}") from error
