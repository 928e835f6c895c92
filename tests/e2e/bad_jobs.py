"""One job of each bad kind, as the bytes of a producer that does not ask our SDK."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.card import ModelCard
from tidemill.errors import ErrorCode
from tidemill.jobs import Job, JobId


@dataclass(frozen=True)
class BadJob:
    """What is submitted, and how its answer must name what is wrong."""

    kind: str
    payload: bytes
    code: ErrorCode
    field: str | None
    limit: int | float | str | None
    says: str

    @property
    def id(self) -> JobId:
        return JobId(f"bad-{self.kind}")


def stand_in(bad: BadJob) -> Job:
    """What is submitted so that its payload can be exchanged for the bad one."""
    return Job(id=bad.id, prompt="-")


def outside_the_contract() -> list[BadJob]:
    """What `Job` itself refuses, wherever it is asked."""

    def bad(kind: str, fields: dict[str, Any], field: str | None, limit: int | None, says: str) -> BadJob:
        payload = json.dumps({"id": f"bad-{kind}", **fields}).encode()
        return BadJob(kind, payload, ErrorCode.UNDECODABLE, field, limit, says)

    return [
        bad("empty-prompt", {"prompt": ""}, "prompt", 1, "at least 1 character"),
        bad("no-prompt", {}, None, None, "exactly one of prompt, messages, prompt_token_ids; got none"),
        bad(
            "no-tokens",
            {"prompt": "x", "params": {"max_tokens": 0}},
            "params.max_tokens",
            1,
            "greater than or equal to 1",
        ),
        bad("unknown-field", {"prompt": "x", "top_p": 0.5}, "top_p", None, "not permitted"),
        bad(
            "wrong-type",
            {"prompt": "x", "params": {"max_tokens": "ten"}},
            "params.max_tokens",
            None,
            "valid integer",
        ),
        bad(
            "nan-temperature",
            {"prompt": "x", "params": {"temperature": float("nan")}},
            "params.temperature",
            None,
            "finite number",
        ),
    ]


def unreadable() -> list[BadJob]:
    """What is no job at all."""
    code = ErrorCode.UNDECODABLE
    return [
        BadJob("no-json", b"Dear worker, please", code, None, None, "JSON"),
        BadJob("no-text", b'\xff\xfe{"prompt": "x"}', code, None, None, "JSON"),
        BadJob("half-a-character", b'{"prompt": "caf\xc3"}', code, None, None, "JSON"),
        BadJob("no-object", b"[1, 2]", code, None, None, "object"),
        BadJob("nothing", b"", code, None, None, "JSON"),
    ]


def beyond_the_model(card: ModelCard, vocab_size: int) -> list[BadJob]:
    """Jobs that only the worker can judge; `limit` is what would have been right."""
    context, cache = card.max_model_len, card.max_total_tokens
    too_long, too_large = ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.KV_CAPACITY_EXCEEDED
    assert cache < context // 2, "the worker's cache must be small for this"

    def bad(
        kind: str, fields: dict[str, Any], code: ErrorCode, field: str, limit: int | str, says: str
    ) -> BadJob:
        payload = json.dumps({"id": f"bad-{kind}", **fields}).encode()
        return BadJob(kind, payload, code, field, limit, says)

    def tokens(count: int, max_tokens: int) -> dict[str, Any]:
        return {"prompt_token_ids": [42] * count, "params": {"max_tokens": max_tokens}}

    return [
        bad(
            "prompt-over-context",
            {"prompt": "mill " * context},
            too_long,
            "prompt",
            context - 1,
            f"of {context} tokens",
        ),
        bad(
            "output-over-context",
            tokens(10, context),
            too_long,
            "params.max_tokens",
            context - 10,
            f"at most {context - 10} fit",
        ),
        bad(
            "prompt-over-cache",
            tokens(cache + 1, 1),
            too_large,
            "prompt_token_ids",
            cache - 1,
            f"of {cache} tokens",
        ),
        bad(
            "output-over-cache",
            tokens(10, cache),
            too_large,
            "params.max_tokens",
            cache - 10,
            f"at most {cache - 10} fit",
        ),
        bad(
            "another-model",
            {"prompt": "x", "model": "gpt-oss-120b"},
            ErrorCode.MODEL_MISMATCH,
            "model",
            card.model,
            f"serves {card.model}, not gpt-oss-120b",
        ),
        bad(
            "bad-stop-token",
            {"prompt": "x", "params": {"stop_token_ids": [0, vocab_size]}},
            ErrorCode.INVALID_REQUEST,
            "params.stop_token_ids.1",
            vocab_size,
            f"vocabulary of {vocab_size} tokens",
        ),
        bad(
            "bad-prompt-token",
            {"prompt_token_ids": [0, vocab_size]},
            ErrorCode.INVALID_REQUEST,
            "prompt_token_ids.1",
            vocab_size,
            f"vocabulary of {vocab_size} tokens",
        ),
    ]


GARBAGE: Sequence[dict[bytes, bytes]] = (
    {b"\xff\xfe": b"\x00\x9f"},
    {b"id": b"\xf0\x28 unreadable"},
    {b"id": b"nobody-submitted-this"},
)
"""Entries that somebody writes straight into a job stream."""
