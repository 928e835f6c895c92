"""Structured output: texts drawn from the masks are what was asked for, whatever the vocabulary."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.worker.grammar_texts import (
    SCHEMAS,
    allowed,
    make_compiler,
    make_tiny,
    outputs,
    random_text,
    random_tokens,
)
from tests.worker.tiny_tokenizers import KINDS, make_backend
from tidemill.params import SamplingParams
from tidemill_worker.grammar import GrammarCompiler
from tidemill_worker.tokenizer import Tokenizer

SMOLLM2_ENDS = {0, 2}
CALCULATION = """
start: sum
sum: sum "+" term | term
term: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""
CALCULATION_EBNF = """
# the same for llama.cpp
root ::= expression
expression ::= number ("+" number){0,3}
number ::= [0-9] [0-9]?
"""


@pytest.fixture(scope="module")
def tiny() -> Iterator[GrammarCompiler]:
    compiler = make_compiler()
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def large(smollm2: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(smollm2, SMOLLM2_ENDS)
    yield compiler
    compiler.close()


def validate(text: str, schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    validator.validate(json.loads(text))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
@pytest.mark.parametrize("seed", range(4))
def test_a_text_of_a_schema_validates(
    large: GrammarCompiler, smollm2: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    compiled = large.compile(outputs(json=schema))
    validate(random_text(compiled, smollm2, random.Random(seed), end_of_text=SMOLLM2_ENDS), schema)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_text_of_a_schema_validates_with_a_tiny_vocabulary(
    tiny: GrammarCompiler, schema: dict[str, Any]
) -> None:
    compiled = tiny.compile(outputs(json=json.dumps(schema)))
    for seed in range(4):
        validate(random_text(compiled, make_tiny(), random.Random(seed), end_of_text={0}), schema)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]{1,9}@[a-z]{1,9}\.(com|org)",
        r"^\d{3}-\d{2,4}$",
        r"(?i)yes|no",
        r"Ď[áá]bel( 水車){0,3}🌊?",
        r'say "[^"\n]{2,9}"/\\',
        r"(a|b)*abb",
        r".{5}\n.{0,3}",
    ],
)
def test_a_text_of_a_regular_expression_matches_it(
    tiny: GrammarCompiler, large: GrammarCompiler, smollm2: Tokenizer, pattern: str
) -> None:
    compiled = [tiny.compile(outputs(regex=pattern)), large.compile(outputs(regex=pattern))]
    for seed in range(5):
        for one, tokenizer, ends in zip(compiled, (make_tiny(), smollm2), ({0}, SMOLLM2_ENDS), strict=True):
            text = random_text(one, tokenizer, random.Random(seed), end_of_text=ends)
            assert re.fullmatch(pattern, text)


def test_every_choice_and_nothing_else_is_drawn(tiny: GrammarCompiler) -> None:
    choices = ("yes", "no", "yes, please", "ďábel", "水", "a.b", "(x", " lead", "two\nlines", 'q"\\/')
    compiled, dice = tiny.compile(outputs(choice=choices)), random.Random(0)
    drawn = {random_text(compiled, make_tiny(), dice, end_of_text={0}) for _ in range(150)}
    assert drawn == set(choices)


def test_a_json_object_without_a_schema_is_one(tiny: GrammarCompiler) -> None:
    compiled = tiny.compile(outputs(json_object=True))
    for seed in range(30):
        tokens = random_tokens_that_close(compiled.start(), random.Random(seed))
        assert isinstance(json.loads(b"".join(map(make_tiny().token_bytes, tokens))), dict)


def random_tokens_that_close(grammar: Any, dice: random.Random) -> list[int]:
    """Ten tokens at random, then what closes strings, arrays and objects whenever it may come."""
    tiny, tokens = make_tiny(), []
    closing = [token for token in range(tiny.vocab_size) if tiny.token_bytes(token) in (b'"', b"]", b"}")]
    while not grammar.is_complete:
        options = sorted(allowed(grammar) - {0})
        closers = [token for token in closing if token in options]
        tokens.append(dice.choice(closers if closers and len(tokens) > 10 else options))
        grammar.accept(tokens[-1])
        assert len(tokens) < 400
    return tokens


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [(CALCULATION, r"[0-9+()]+"), (CALCULATION_EBNF, r"\d{1,2}(\+\d{1,2}){0,3}")],
    ids=["lark", "ebnf"],
)
def test_a_text_of_a_grammar_belongs_to_it(tiny: GrammarCompiler, grammar: str, pattern: str) -> None:
    compiled = tiny.compile(outputs(grammar=grammar))
    for seed in range(20):
        text = random_text(compiled, make_tiny(), random.Random(seed), end_of_text={0})
        assert re.fullmatch(pattern, text)
        assert text.count("(") == text.count(")")
        eval(re.sub(r"\b0+(?=\d)", "", text))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "wordlevel"])  # it has no "," by itself
def test_any_kind_of_tokenizer_writes_what_was_asked_for(kind: str) -> None:
    tokenizer = make_tiny(kind)
    end = max(tokenizer.special_tokens)
    compiler = make_compiler(tokenizer, end_of_text={end})
    texts = ["the tide", "tide", " the corn.", "the mill, and"]
    compiled = compiler.compile(outputs(choice=texts))
    for seed in range(10):
        tokens = random_tokens(compiled.start(), random.Random(seed), {end})
        prompt = make_backend(kind).encode("the corn").ids
        text = tokenizer.output_text(SamplingParams(), prompt)
        for token in tokens:
            text.append(token)
        assert text.close() in texts
    compiler.close()
