"""Masks: exactly the tokens that some text could go on with, for every kind of vocabulary."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import regex

from tests.worker.grammar_texts import SCHEMAS, allowed, make_compiler, make_tiny, outputs, random_tokens
from tidemill_worker.grammar import Grammar, GrammarCompiler
from tidemill_worker.structured_source import WHITESPACE
from tidemill_worker.tokenizer import Tokenizer

END = {0}
CHOICES = ("the tide", "the mill", "mill", "ďábel", "ďas", "水車", "水車は潮", "🌊", "a\n b", "<|endoftext|>")
PATTERN = r"([A-C]{1,3} ?){2}(the|mill)*\.?"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["mill", "tide"]}},
    "required": ["x"],
    "additionalProperties": False,
}
POINT_PATTERN = r'\{W"x"W:W(0|[1-9][0-9]?)(W,W"kind"W:W("mill"|"tide"))?W\}'.replace(
    "W", f"(?:{WHITESPACE})?"
)

INLINE = f"start: %json {json.dumps({**POINT, 'x-guidance': {'whitespace_flexible': True}})}"
BLANKS = b" \n\t\r"

Continues = Callable[[bytes], bool]
"""Whether these bytes are the beginning of a text that was asked for."""


def begins_a_choice(text: bytes) -> bool:
    return any(choice.encode().startswith(text) for choice in CHOICES)


def begins_a_match(pattern: str) -> Continues:
    compiled = regex.compile(pattern.encode())
    return lambda text: compiled.fullmatch(text, partial=True) is not None


def is_whole(pattern: str) -> Continues:
    compiled = regex.compile(pattern.encode())
    return lambda text: compiled.fullmatch(text) is not None


CASES: dict[str, tuple[dict[str, Any], Continues, Continues]] = {
    "choice": ({"choice": CHOICES}, begins_a_choice, lambda text: text.decode(errors="replace") in CHOICES),
    "regex": ({"regex": PATTERN}, begins_a_match(PATTERN), is_whole(PATTERN)),
    "json": ({"json": POINT}, begins_a_match(POINT_PATTERN), is_whole(POINT_PATTERN)),
}


@pytest.fixture(scope="module")
def large(smollm2: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = make_compiler(smollm2, end_of_text={2})
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    ("kind", "case"),
    [*itertools.product(["gpt2", "llama3", "llama2", "gemma"], CASES), ("unigram", "choice")],
)
def test_a_mask_is_every_token_that_some_text_goes_on_with(kind: str, case: str) -> None:
    asked, begins, is_text = CASES[case]
    tokenizer = make_tiny(kind)
    end = min(tokenizer.special_tokens)
    pieces = {token: tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    compiler = make_compiler(tokenizer, end_of_text={end})
    compiled = compiler.compile(outputs(**asked))
    for seed in range(12):
        grammar, dice, text = compiled.start(), random.Random(seed), b""
        while not grammar.is_complete:
            expected = {t for t, piece in pieces.items() if piece and begins(text + piece)}
            expected -= tokenizer.special_tokens
            assert allowed(grammar) == expected | ({end} if is_text(text) else set()), text
            if not expected:  # a vocabulary without all bytes cannot write every text
                assert is_text(text) or (kind == "unigram" and grammar.error is not None)
                break
            token = dice.choice(sorted(expected))
            grammar.accept(token)
            text += pieces[token]
        assert is_text(text) or grammar.error is not None
    compiler.close()


def test_the_mask_covers_ids_that_only_the_model_has_and_allows_none_of_them() -> None:
    tokenizer = make_tiny()
    known, wider = tokenizer.vocab_size, make_tiny()
    wider.vocab_size = known + 100
    grammar = make_compiler(wider).compile(outputs(regex=".+")).start()
    assert len(grammar.allowed_tokens()) == (known + 100 + 31) // 32
    assert max(allowed(grammar)) < known


def test_control_tokens_are_not_text_however_they_are_spelled() -> None:
    tokenizer = make_tiny("llama3")
    grammar = (
        make_compiler(tokenizer, end_of_text={1}).compile(outputs(choice=["<s></s>", "<|im_end|>"])).start()
    )
    assert not allowed(grammar) & tokenizer.special_tokens
    tokens = random_tokens(grammar, random.Random(0), {1})
    assert b"".join(map(tokenizer.token_bytes, tokens)) in (b"<s></s>", b"<|im_end|>")


def test_each_end_of_text_may_come_where_the_text_may_end_and_nowhere_else() -> None:
    tokenizer = make_tiny("llama3")
    digit = next(t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == b"7")
    grammar = make_compiler(tokenizer, end_of_text={0, 1}).compile(outputs(regex="[0-9]{1,2}")).start()
    assert allowed(grammar) & {0, 1} == set()
    grammar.accept(digit)
    assert allowed(grammar) >= {0, 1}
    assert not grammar.is_complete
    grammar.accept(digit)
    assert grammar.is_complete
    assert allowed(grammar) == {0, 1}


def test_without_an_end_of_text_a_text_ends_where_nothing_can_follow() -> None:
    compiler = make_compiler(end_of_text=set())
    tokens = random_tokens(
        compiler.compile(outputs(choice=["the tide", "the"])).start(), random.Random(1), set()
    )
    assert b"".join(map(make_tiny().token_bytes, tokens)) == b"the tide"
    compiler.close()


def test_end_of_text_completes_a_grammar_that_may_end() -> None:
    tokenizer = make_tiny()
    grammar = make_compiler(tokenizer).compile(outputs(regex="[a-z]+")).start()
    grammar.accept(random.Random(0).choice(sorted(allowed(grammar))))
    grammar.accept(0)
    assert grammar.error is None
    assert grammar.is_complete


@pytest.mark.parametrize("wrong", [0, 5, 10_000], ids=["end of text", "another token", "no token"])
def test_a_token_that_is_not_allowed_fails_the_grammar_for_good(wrong: int) -> None:
    grammar = make_compiler().compile(outputs(choice=["the tide"])).start()
    first = sorted(allowed(grammar))[0]
    grammar.accept(wrong)
    assert grammar.error is not None
    assert f"token {wrong}" in grammar.error
    assert "\n" not in grammar.error
    assert allowed(grammar) == set()
    grammar.accept(first)
    assert allowed(grammar) == set()
    assert not grammar.is_complete


def test_a_mask_that_was_given_up_allows_nothing_whenever_it_comes() -> None:
    grammar = make_compiler().compile(outputs(choice=["the tide"])).start()
    assert allowed(grammar)
    late = grammar._words  # what native code, which cannot be stopped, goes on to write to
    grammar.fail("too slow")
    late.fill(0xFFFFFFFF)
    assert allowed(grammar) == set()


@pytest.mark.parametrize("cut", [0, 1, 7, 20])
def test_a_grammar_started_behind_tokens_goes_on_as_if_nothing_had_happened(cut: int) -> None:
    compiled = make_compiler().compile(outputs(json=SCHEMAS["invoice"]))
    tokens = random_tokens(compiled.start(), random.Random(2), END)
    assert len(tokens) > 30
    undisturbed, resumed = compiled.start(), compiled.start(tokens[:cut])
    for token in tokens[:cut]:
        undisturbed.accept(token)
    for token in tokens[cut:]:
        assert allowed(resumed) == allowed(undisturbed)
        resumed.accept(token)
        undisturbed.accept(token)
    assert resumed.is_complete == undisturbed.is_complete
    assert compiled.start(tokens).is_complete == undisturbed.is_complete


@pytest.mark.parametrize(
    "asked", [{"json": POINT}, {"json_object": True}, {"json": True}, {"grammar": INLINE}], ids=str
)
@pytest.mark.parametrize("blank", [b" ", b"\n", b"\t"])
def test_whitespace_comes_to_an_end(
    asked: dict[str, Any], blank: bytes, smollm2: Tokenizer, large: GrammarCompiler
) -> None:
    """A model that would rather write blanks than anything else still gets on."""
    grammar, written = large.compile(outputs(**asked)).start(), b""
    while not grammar.is_complete:
        pieces = {smollm2.token_bytes(token): token for token in allowed(grammar) - {2}}
        blanks = (
            [piece for piece in pieces if not piece.strip(BLANKS)] if written.count(b'"') % 2 == 0 else []
        )
        liked = [piece for piece in blanks if not piece.strip(blank)] or blanks
        needed = [piece for piece in (b"{", b"}", b'"', b":", b"x", b"1") if piece in pieces]
        piece = (liked or needed)[0]
        grammar.accept(pieces[piece])
        written += piece
        assert len(written) < 400
    runs = [len(run) for run in regex.findall(rb"[ \n\t\r]+", written)]
    assert json.loads(written) in ({"x": 1}, {}, 1, "")
    assert runs == [] or 1 <= max(runs) <= 33
    assert runs or asked == {"json": True}


def test_a_hundred_grammars_on_four_threads_disturb_none() -> None:
    tokenizer, compiler = make_tiny(), make_compiler()
    asked = [{"json": schema} for schema in SCHEMAS.values()] + [{"regex": PATTERN}, {"choice": CHOICES}]
    gate = threading.Barrier(4)

    def write(thread: int) -> list[list[int]]:
        gate.wait()
        jobs = range(thread, 100, 4)
        grammars = [compiler.compile(outputs(**asked[job % len(asked)])).start() for job in jobs]
        return [random_tokens(g, random.Random(job), END) for job, g in zip(jobs, grammars, strict=True)]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(write, range(4)))
    for thread, texts in enumerate(together):
        for job, tokens in zip(range(thread, 100, 4), texts, strict=True):
            alone = compiler.compile(outputs(**asked[job % len(asked)])).start()
            assert tokens == random_tokens(alone, random.Random(job), END)
            if "json" in asked[job % len(asked)]:
                json.loads(b"".join(map(tokenizer.token_bytes, tokens)))
    compiler.close()


def test_masks_are_not_computed_on_the_thread_that_takes_tokens_in(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    compute = Grammar.compute
    monkeypatch.setattr(
        Grammar, "compute", lambda self: (threads.append(threading.current_thread()), compute(self))[1]
    )
    grammar = make_compiler().compile(outputs(choice=["the tide"])).start()
    grammar.accept(sorted(allowed(grammar))[0])
    allowed(grammar)
    assert len(threads) == 2
    assert threading.current_thread() not in threads
