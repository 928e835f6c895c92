"""Texts drawn from a grammar's masks, and schemas whose texts end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.worker.tiny_tokenizers import make_backend
from tidemill.params import StructuredOutputs
from tidemill_worker.grammar import CompiledGrammar, Grammar, GrammarCompiler
from tidemill_worker.tokenizer import Tokenizer

Compile = Callable[..., CompiledGrammar]

MONEY = {"type": "number", "minimum": 0, "maximum": 99999, "multipleOf": 0.25}
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "minLength": 1, "maxLength": 40},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "country": {"enum": ["CZ", "DE", "日本", None]},
    },
    "required": ["street", "country"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"type": ["string", "null"], "maxLength": 12},
            "married": {"type": "boolean"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "invoice": {
        "type": "object",
        "properties": {
            "number": {"type": "string", "pattern": "^INV-[0-9]{4,8}$"},
            "issued": {"type": "string", "format": "date"},
            "to": {"$ref": "#/$defs/address"},
            "lines": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {"item": {"type": "string", "maxLength": 10}, "price": MONEY},
                    "required": ["item", "price"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["number", "issued", "to", "lines"],
        "additionalProperties": False,
        "$defs": {"address": ADDRESS},
    },
    "nested arrays": {
        "type": "array",
        "maxItems": 3,
        "items": {"type": "array", "maxItems": 3, "items": {"type": "integer", "minimum": -9, "maximum": 99}},
    },
    "enum": {"enum": ["low", "high", 3, None, True, {"a": [1]}]},
    "const": {"const": 'Ďábel 🌊\n"quoted" \\ and /'},
    "bounded numbers": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.125},
    },
    "one of two shapes": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, key: {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["kind", key],
                "additionalProperties": False,
            }
            for kind, key in (("circle", "radius"), ("square", "side"))
        ]
    },
    "any of": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}, {"type": "null"}]},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "string", "maxLength": 4}],
        "items": False,
        "minItems": 2,
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "minimum": 0, "maximum": 9},
                    "sub": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    },
    "map": {
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {"^n_[a-z]{1,3}$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "maxProperties": 2,
    },
}


def make_tiny(kind: str = "gpt2") -> Tokenizer:
    return Tokenizer(make_backend(kind))


def make_compiler(
    tokenizer: Tokenizer | None = None, *, end_of_text: set[int] | None = None
) -> GrammarCompiler:
    return GrammarCompiler(tokenizer or make_tiny(), {0} if end_of_text is None else end_of_text)


def outputs(**kind: Any) -> StructuredOutputs:
    return StructuredOutputs.model_validate(kind)


def allowed(grammar: Grammar) -> set[int]:
    """The token ids of the current mask."""
    bits = np.unpackbits(grammar.allowed_tokens().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def random_tokens(
    grammar: Grammar, dice: random.Random, end_of_text: set[int], *, most: int = 2000
) -> list[int]:
    """Tokens drawn evenly from what is allowed, until the text is complete or end of text is drawn."""
    token_ids: list[int] = []
    while not grammar.is_complete:
        assert len(token_ids) < most, "this text does not end"
        choice = dice.choice(sorted(allowed(grammar)))
        if choice in end_of_text:
            break
        grammar.accept(choice)
        assert grammar.error is None, grammar.error
        token_ids.append(choice)
    return token_ids


def random_text(
    compiled: CompiledGrammar, tokenizer: Tokenizer, dice: random.Random, *, end_of_text: set[int]
) -> str:
    token_ids = random_tokens(compiled.start(), dice, end_of_text)
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode()
