"""What cannot be honoured is refused when the job is admitted: field, limit and reason in one line."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.worker.grammar_texts import allowed, make_compiler, make_tiny, outputs
from tidemill.errors import ErrorCode, InvalidJob
from tidemill.params import MAX_SCHEMA_BYTES
from tidemill_worker import grammar as grammar_module
from tidemill_worker.grammar import GrammarCompiler
from tidemill_worker.structured_schema import can_end
from tidemill_worker.structured_source import to_lark
from tidemill_worker.structured_trial import Budget, GrammarTrial
from tidemill_worker.structured_vocabulary import Vocabulary

IMPOSSIBLE: dict[str, Any] = {
    "false": False,
    "bounds": {"type": "integer", "minimum": 5, "maximum": 4},
    "lengths": {"type": "string", "minLength": 5, "maxLength": 2},
    "empty enum": {"enum": []},
    "a property that may not be": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "a property nobody may add": {"type": "object", "required": ["b"], "additionalProperties": False},
    "no end": {
        "type": "object",
        "properties": {"next": {"$ref": "#"}},
        "required": ["next"],
    },
    "itself": {"$ref": "#"},
}
UNKNOWN: dict[str, Any] = {
    "not": {"type": "string", "not": {"const": "a"}},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 3}},
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "format": {"type": "string", "format": "shoe-size"},
    "type": {"type": "strin"},
    "look": {"type": "string", "pattern": "^(?=a)a$"},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]},
    "https://example.com/x.json": {"$ref": "https://example.com/x.json"},
    "/$defs/missing": {"$ref": "#/$defs/missing"},
    "nested": {"items": {"properties": {"a": {"not": {}}}}},
    "x-guidance": {"not": {}, "x-guidance": {"lenient": True}},
}
TEXTS: dict[str, tuple[str, str, str]] = {
    "lookahead": ("regex", "(?=a)a", "look-around"),
    "backreference": ("regex", r"(a)\1", "backreferences"),
    "word boundary": ("regex", r"\bfoo\b", "lookarounds"),
    "unclosed": ("regex", "a(", "unclosed group"),
    "nothing matches": ("regex", r"[^\s\S]", "no text"),
    "only nothing matches": ("regex", "(){3}", "empty text"),
    "unknown rule": ("grammar", "start: foo", 'unknown name: "foo"'),
    "no start": ("grammar", 'root: "a"', "no start rule"),
    "garbage": ("grammar", "@@@ {{ %%", "lexer error"),
    "empty rule": ("grammar", 'start: ""', "empty text"),
    "a rule that is itself": ("grammar", "start: start", "no text"),
    "temperature": ("grammar", 'start: a "b"\na[temperature=0.5]: /a+/', "temperature"),
    "stop": ("grammar", 'start: a "b"\na[stop="c"]: /a+/', "stop"),
    "the library's own notation": ("grammar", '{"grammars":[{"json_schema":{"not":{}}}]}', "neither Lark"),
    "a file": ("grammar", '%import /etc/passwd\nstart: "a"', "Expected name"),
    "inline schema": ("grammar", 'start: %json {"not": {}}', '"not"'),
    "inline nonsense": ("grammar", "start: %json [1]", "object"),
    "no root": ("grammar", 'tree ::= "a"', "No 'root' rule"),
    "open text": ("grammar", 'root ::= "a', "Unexpected end of input"),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = make_compiler()
    yield compiler
    compiler.close()


def refusal(compiler: GrammarCompiler, **asked: Any) -> InvalidJob:
    with pytest.raises(InvalidJob) as raised:
        compiler.compile(outputs(**asked))
    assert raised.value.code is ErrorCode.INVALID_REQUEST
    assert raised.value.field == f"params.structured_outputs.{next(iter(asked))}"
    assert str(raised.value).startswith(f"{raised.value.field}: ")
    assert "\n" not in str(raised.value)
    assert "1(8)" not in str(raised.value) or "grammar" in asked
    return raised.value


@pytest.mark.parametrize("schema", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_schema_that_nothing_satisfies_is_refused(compiler: GrammarCompiler, schema: Any) -> None:
    refusal(compiler, json=schema)


@pytest.mark.parametrize(("word", "schema"), UNKNOWN.items(), ids=UNKNOWN.keys())
def test_a_keyword_that_would_not_be_honoured_is_refused(
    compiler: GrammarCompiler, word: str, schema: Any
) -> None:
    reason = str(refusal(compiler, json=schema))
    assert (
        "not" if word in ("nested", "x-guidance") else word.removesuffix("Type")
    ) in reason or word == "type"


@pytest.mark.parametrize(("kind", "text", "reason"), TEXTS.values(), ids=TEXTS.keys())
def test_a_text_that_is_no_pattern_or_grammar_is_refused(
    compiler: GrammarCompiler, kind: str, text: str, reason: str
) -> None:
    assert reason in str(refusal(compiler, **{kind: text}))


def test_choices_are_bounded_together(compiler: GrammarCompiler) -> None:
    choices = [f"{index} {'x' * 1000}" for index in range(100)]
    assert refusal(compiler, choice=choices).limit == MAX_SCHEMA_BYTES
    compiler.compile(outputs(choice=choices[:60]))


HOSTILE: dict[str, dict[str, Any]] = {
    "intersected patterns": {
        "json": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}c{n}"} for n in range(30)]}
    },
    "a large modulus": {"json": {"type": "integer", "multipleOf": 1_000_003}},
    "rules thousands deep": {
        "grammar": "start: r0\n" + "\n".join(f"r{n}:r{n + 1}" for n in range(4500)) + '\nr4500: "a"'
    },
    "patterns that double": {
        "grammar": "start: R0\n" + "\n".join(f"R{n}: R{n + 1} R{n + 1}" for n in range(40)) + '\nR40: "a"'
    },
    "a crossing of many choices": {
        "json": {
            "allOf": [
                {"anyOf": [{"required": [f"{n}.{m}"], "type": "object"} for m in range(6)]} for n in range(12)
            ]
        }
    },
}


@pytest.mark.parametrize("asked", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_would_take_too_much_is_refused_and_harms_nobody(
    compiler: GrammarCompiler, asked: dict[str, Any]
) -> None:
    refusal(compiler, **asked)
    assert compiler.compile(outputs(choice=["still", "here"])).start().allowed_tokens().any()


@pytest.mark.parametrize(
    ("budget", "reason"),
    [(Budget(cpu_seconds=0.02), "more than 0.02 s"), (Budget(memory=4 << 20), "more than 4 MB")],
)
def test_a_grammar_has_a_budget_of_time_and_of_memory(budget: Budget, reason: str) -> None:
    trial = GrammarTrial(Vocabulary.of(make_tiny(), {0}), budget)
    large = to_lark(outputs(json={"type": "integer", "multipleOf": 100_003}))
    assert reason in str(trial.refusal_of(large))
    assert trial.refusal_of(to_lark(outputs(json={"type": "integer", "multipleOf": 3}))) is None
    trial.close()


def test_what_turns_out_to_take_too_much_fails_its_own_generation(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(outputs(regex="(((a{1,100}){1,100}){1,100}){1,100}")).start()
    letter = min(allowed(grammar))
    for _ in range(100):
        grammar.accept(letter)
        if not allowed(grammar):
            break
    assert grammar.error is not None
    assert "too many" in grammar.error
    assert "\n" not in grammar.error


def test_a_refusal_is_remembered_like_a_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ({"regex": "remember [me]"}, {"regex": "(?=remembered)"})
    compiler.compile(outputs(**asked[0]))
    refusal(compiler, **asked[1])
    monkeypatch.setattr(grammar_module.GrammarTrial, "refusal_of", lambda *_: pytest.fail("tried again"))
    compiler.compile(outputs(**asked[0])).start()
    refusal(compiler, **asked[1])


def test_no_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(grammar_module, "CACHE_SIZE", 3)
    monkeypatch.setattr(grammar_module.GrammarTrial, "refusal_of", lambda _, text: tried.append(text))
    compiler = make_compiler()
    for choice in "abcaabd":  # "a" is used again and again, "c" is forgotten when "d" comes
        compiler.compile(outputs(choice=[choice]))
    assert len(tried) == 4
    compiler.compile(outputs(choice=["a"]))
    assert len(tried) == 4
    compiler.compile(outputs(choice=["c"]))
    assert len(tried) == 5
    compiler.close()


@pytest.mark.parametrize("moment", ["idle", "asked"])
def test_a_trial_process_that_somebody_kills_is_replaced(
    moment: str,
) -> None:
    trial = GrammarTrial(Vocabulary.of(make_tiny(), {0}))
    assert trial.refusal_of(to_lark(outputs(choice=["one"]))) is None
    child = trial._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL if moment == "idle" else signal.SIGSTOP)
    if moment == "idle":
        child.wait()
    else:  # it has the grammar, and is killed before it can answer
        threading.Timer(0.05, child.kill).start()
    assert trial.refusal_of(to_lark(outputs(choice=["two"]))) is None
    assert trial._child is not child
    trial.close()
    assert trial._child is not None
    assert trial._child.poll() is not None


def test_trials_that_cannot_be_made_are_no_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    trial = GrammarTrial(Vocabulary.of(make_tiny(), {0}))
    with pytest.raises(RuntimeError, match="status 1"):
        trial.refusal_of(to_lark(outputs(choice=["one"])))
    trial.close()


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1}, True),
        ({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"items": {"$ref": "#"}, "minItems": 1}, True),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, True),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False),
        ({"$ref": "#/$defs/missing"}, True),
        ({"$ref": "https://example.com/x.json"}, True),
        ({"$ref": "#/$defs/a~1b/0", "$defs": {"a/b": [False]}}, False),
        (True, True),
        (False, False),
    ],
)
def test_a_schema_ends_if_some_text_need_not_contain_another(schema: Any, ends: bool) -> None:
    assert can_end(schema) is ends


def test_a_long_chain_of_references_is_followed_to_its_end() -> None:
    links = {f"n{n}": {"$ref": f"#/$defs/n{n + 1}"} for n in range(900)}
    assert can_end({"$ref": "#/$defs/n0", "$defs": {**links, "n900": {"type": "null"}}})
    assert not can_end({"$ref": "#/$defs/n0", "$defs": {**links, "n900": {"$ref": "#/$defs/n0"}}})
