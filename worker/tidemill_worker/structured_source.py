"""From what a job asks of its text to a grammar in the library's own notation.

Whitespace in JSON is bounded wherever it may stand: nothing, a space, or a new line and its
indentation. A model that has lost its way could otherwise indent for ever, and be right to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from tidemill.errors import InvalidJob
from tidemill.params import MAX_SCHEMA_BYTES, StructuredOutputs
from tidemill_worker.structured_schema import can_end

WHITESPACE = r" |\n {0,32}|\n\t{0,16}"
"""Between two parts of a JSON text, once: as compact as one likes, or indented eight levels deep."""

JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
"""Never `lenient`: a keyword that is not understood must be refused, not ignored."""

OPTIONS = '%llguidance {"no_forcing": true}'
"""Leave the cutting of a text into tokens to the model, even where there is only one text to write.
The library would otherwise ask the tokenizer, in Python, while a mask is computed."""

ANY_JSON = rf"""
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{{" (pair ("," pair)*)? "}}"
pair: STRING ":" value
array: "[" (value ("," value)*)? "]"
STRING: /"([^"\\\x00-\x1F\x7F]|\\(["\\\/bfnrt]|u[0-9a-cA-C][0-9a-fA-F]{{3}}))*"/
NUMBER: /-?(0|[1-9][0-9]{{0,18}})(\.[0-9]{{1,18}})?([eE][+-]?[0-9]{{1,2}})?/
%ignore /{WHITESPACE}/
%llguidance {{"ignore_once": true}}
{OPTIONS}
"""
"""JSON without a schema. Its numbers end: where nothing else bounds them, a model may count for ever
(vllm#52011)."""

UNQUOTED = re.compile(
    r"""(?P<json>%json\s*) | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/ | //[^\n]* | \#[^\n]*""", re.VERBOSE
)
"""In a Lark grammar: inline schemas, and all that is not to be searched for options of rules."""

EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

UNSUPPORTED_OPTION = re.compile(r"\b(temperature|stop)\s*=")


def to_lark(outputs: StructuredOutputs) -> str:
    """The grammar that the library compiles.

    Raises:
        InvalidJob: naming the field, if it can be seen already that it cannot be compiled.
    """
    if outputs.json_schema is not None:
        return _json_schema(outputs.json_schema)
    if outputs.json_object:
        return f"start: object\n{ANY_JSON}"
    if outputs.regex is not None:
        return _regex(outputs.regex)
    if outputs.choice is not None:
        return _choice(outputs.choice)
    return _grammar(outputs.grammar or "")


def refused(kind: str, reason: str, *, limit: int | float | None = None) -> InvalidJob:
    """The refusal of a job for one of the fields of `structured_outputs`."""
    field = f"params.structured_outputs.{kind}"
    return InvalidJob(f"{field}: {reason}", field=field, limit=limit)


def _json_schema(schema: Mapping[str, Any] | bool) -> str:
    if not can_end(schema):
        raise refused("json", "no text satisfies this schema")
    if schema is True or schema == {}:
        return f"start: value\n{ANY_JSON}"
    assert isinstance(schema, Mapping)
    return f"start: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}\n{OPTIONS}\n"


def _regex(regex: str) -> str:
    return f"start: /{regex_to_lark(regex, use_ascii='d')}/\n{OPTIONS}\n"


def _choice(choices: Sequence[str]) -> str:
    size = sum(len(choice.encode()) for choice in choices)
    if size > MAX_SCHEMA_BYTES:
        reason = f"together they have {size} bytes, at most {MAX_SCHEMA_BYTES} are taken"
        raise refused("choice", reason, limit=MAX_SCHEMA_BYTES)
    return f"start: /{'|'.join(map(_literal, choices))}/\n{OPTIONS}\n"


def _literal(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _grammar(text: str) -> str:
    if text.lstrip().startswith("{"):
        raise refused("grammar", "neither Lark nor EBNF")
    if EBNF_RULE.search(text):
        text = _from_ebnf(text)
    bare = UNQUOTED.sub(" ", text)
    if option := UNSUPPORTED_OPTION.search(bare):
        raise refused("grammar", f"the option {option[1]} of a rule is not supported")
    return f"{_with_bounded_json(text)}\n{OPTIONS}\n"


def _from_ebnf(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # it raises whatever its parser stumbles over, IndexError too
        raise refused("grammar", f"not EBNF: {error}") from error


def _with_bounded_json(text: str) -> str:
    """Give the schemas inside a Lark grammar our options."""
    parts, end = [], 0
    for match in UNQUOTED.finditer(text):
        if match["json"] is None or match.start() < end:
            continue
        try:
            schema, stop = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError) as error:
            raise refused("grammar", f"%json: {error}") from error
        if not isinstance(schema, dict):
            raise refused("grammar", "%json: a schema is an object")
        parts += [text[end : match.end()], json.dumps({**schema, "x-guidance": JSON_OPTIONS})]
        end = stop
    return "".join([*parts, text[end:]])
