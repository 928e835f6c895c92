"""How a job's tokens are chosen, what they may be, and when they end.

Names and meanings are vLLM's and OpenAI's; `docs/parameters.md` says them for users.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json, to_json

from tidemill.schema import Token, Wire

MAX_SCHEMA_BYTES = 1 << 16
"""Of a schema, regular expression or grammar; compiling one takes time and memory of its size."""

StopString = Annotated[str, Field(min_length=1, max_length=256)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
NumLogprobs = Annotated[int, Field(ge=0, le=20, strict=True)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_BYTES)]
Alternative = Annotated[str, Field(min_length=1, max_length=1024)]


class StructuredOutputs(Wire):
    """What the text must be: exactly one of these."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    json_schema: Mapping[str, Any] | bool | None = Field(default=None, alias="json")
    """JSON that satisfies this JSON schema, given as an object or as its text."""
    json_object: Literal[True] | None = None
    """Any JSON object."""
    regex: Pattern | None = None
    """Text that this regular expression matches from beginning to end."""
    choice: tuple[Alternative, ...] | None = Field(default=None, min_length=1, max_length=1024)
    """One of these strings."""
    grammar: Pattern | None = None
    """Text of this context-free grammar, in Lark's notation or as EBNF (`root ::= ...`)."""

    @field_validator("json_schema", mode="before")
    @classmethod
    def _as_on_the_wire(cls, value: object) -> object:
        """What a worker will read, which takes no NaN, no half of a surrogate pair, no depth of hundreds."""
        if value is None:
            return None
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            size = len(json.dumps(schema, allow_nan=False))
            job = {"params": {"structured_outputs": {"json": schema}}}
            schema = from_json(to_json(job))["params"]["structured_outputs"]["json"]
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(schema, dict | bool):
            raise ValueError("give a schema as an object, or as its text")
        if size > MAX_SCHEMA_BYTES:
            raise ValueError(f"the schema has {size} bytes, at most {MAX_SCHEMA_BYTES} are taken")
        return schema

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            names = ", ".join(name.removesuffix("_schema") for name in given) or "none"
            raise ValueError(f"give exactly one of json, json_object, regex, choice, grammar; got {names}")
        return self

    @property
    def kind(self) -> str:
        """Which of the fields is given, by the name that users write."""
        return next(name for name, value in self if value is not None).removesuffix("_schema")


class SamplingParams(Wire):
    """How tokens are chosen and when to stop."""

    max_tokens: int = Field(default=256, ge=1, strict=True)
    """Tokens to generate at most; the worker also holds it to the model's context."""
    min_tokens: int = Field(default=0, ge=0, strict=True)
    """So many tokens are generated before a token or a string may end the generation."""
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    """0 is greedy."""
    n: int = Field(default=1, ge=1, le=64, strict=True)
    """Generations of one prompt; each draws from noise of its own."""
    top_k: int = Field(default=0, ge=-1, strict=True)
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Keep tokens of at least this share of the most likely one's probability."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    """Above 1, makes tokens of the prompt and of the text so far less likely."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken from the logit of every token that the text so far contains."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """The same, once for each time that it contains it."""
    logit_bias: Mapping[Annotated[int, Field(ge=0)], Bias] = Field(default_factory=dict, max_length=1024)
    """Added to the logits of these tokens."""
    bad_words: tuple[BadWord, ...] = Field(default=(), max_length=64)
    """Words that are not generated."""
    seed: int | None = Field(default=None, ge=0, lt=2**63, strict=True)
    """Keys the noise. If absent it is drawn once, at submission, so that a resumed job goes on
    with the same numbers."""
    stop: tuple[StopString, ...] = Field(default=(), max_length=16)
    """Generation ends before the first of these strings; it is not part of the text."""
    stop_token_ids: tuple[Token, ...] = Field(default=(), max_length=64)
    """Generation ends after any of these tokens; its text is left out."""
    include_stop_str_in_output: bool = False
    """Let the text end with the stop string instead of before it."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text tokens; for benchmarks."""
    skip_special_tokens: bool = True
    """Leave the model's control tokens out of the text."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, strict=True)
    """Keep only so many tokens from the end of the prompt; -1 keeps what the context has room for."""
    echo: bool = False
    """Let the text begin with the prompt's."""
    logprobs: NumLogprobs | None = None
    """Report each generated token's log-probability, and those of so many most likely ones."""
    prompt_logprobs: NumLogprobs | None = None
    """The same for the tokens of the prompt."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must be: JSON, a pattern, one of several strings, a grammar."""

    @model_validator(mode="before")
    @classmethod
    def _response_format(cls, data: object) -> object:
        """OpenAI's way of asking for JSON is another spelling of `structured_outputs`."""
        if not isinstance(data, Mapping) or "response_format" not in data:
            return data
        rest = {name: value for name, value in data.items() if name != "response_format"}
        outputs = _structured_outputs(data["response_format"])
        if outputs is not None and rest.get("structured_outputs") is not None:
            raise _wrong_response_format("give this or structured_outputs, not both")
        return rest if outputs is None else rest | {"structured_outputs": outputs}

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("top_k")
    @classmethod
    def _all_is_zero(cls, value: int) -> int:
        return max(0, value)

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_something(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("give at least 1, or -1 for what the context has room for")
        return value

    @field_validator("min_tokens")
    @classmethod
    def _within_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        limit = info.data.get("max_tokens", value)
        if value > limit:
            raise PydanticCustomError("min_tokens", f"{value} exceeds max_tokens, {limit}", {"le": limit})
        return value

    @field_validator("n")
    @classmethod
    def _different_generations(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("temperature") == 0:
            message = f"{value} greedy generations would all be the same; ask for 1, or raise temperature"
            raise PydanticCustomError("n", message, {"le": 1})
        return value


def _structured_outputs(response_format: object) -> dict[str, object] | None:
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json": schema}
    raise _wrong_response_format(
        'give {"type": "text"}, {"type": "json_object"} or'
        ' {"type": "json_schema", "json_schema": {"schema": ...}}'
    )


def _wrong_response_format(reason: str) -> PydanticCustomError:
    return PydanticCustomError("response_format", "{reason}", {"reason": reason, "field": "response_format"})
