"""Where text ends: stop strings wherever tokens are cut, what is held back, what counts when."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.tiny_tokenizers import KINDS, make_backend
from tidemill.params import SamplingParams
from tidemill_worker.output_text import StoppedText
from tidemill_worker.tokenizer import Tokenizer


class Words:
    """A decoder whose tokens are strings, so that a test can spell what is generated."""

    def __init__(self, words: Sequence[str], *, prompt_text: str = "", unfinished: str = "") -> None:
        self._words = words
        self._unfinished = unfinished
        self.prompt_text = prompt_text

    def push(self, token_id: int) -> str:
        return self._words[token_id]

    def flush(self) -> str:
        return self._unfinished


def make_text(
    words: Sequence[str], *, prompt_text: str = "", unfinished: str = "", **params: Any
) -> StoppedText:
    decoder = Words(words, prompt_text=prompt_text, unfinished=unfinished)
    return StoppedText(decoder, SamplingParams(max_tokens=100, **params))


def pieces_of(text: StoppedText, token_ids: Sequence[int]) -> list[str]:
    """What a reader is shown, piece by piece, until the end or a stop string."""
    pieces = []
    for token_id in token_ids:
        stopped = text.append(token_id)
        pieces.append(text.take())
        if stopped is not None:
            break
    return [*pieces, text.close()]


def spell(words: Sequence[str], **params: Any) -> tuple[list[str], str | None]:
    """The pieces of an output of these tokens, and the stop string that ended it."""
    output = make_text([*words, "!"], **params)
    pieces = pieces_of(output, range(len(words)))
    return pieces, output.append(len(words))


def cut(
    words: Sequence[str], stop: Sequence[str], *, min_tokens: int = 0, include: bool = False
) -> tuple[str, str | None]:
    """The specification: read character by character, end at the first stop string completed."""
    text = ""
    for number, word in enumerate(words, 1):
        for character in word:
            text += character
            done = [string for string in stop if text.endswith(string)]
            if done and number > min_tokens:
                longest = max(done, key=len)
                return (text if include else text.removesuffix(longest)), longest
    return text, None


def test_text_is_cut_before_the_stop_string() -> None:
    pieces, stopped = spell("one\n\ntwo", stop=["\n\n"])
    assert ("".join(pieces), stopped) == ("one", "\n\n")


def test_what_may_become_a_stop_string_is_held_back() -> None:
    pieces, _ = spell("a<|x<|end|>", stop=["<|end|>"])
    assert pieces[:5] == ["a", "", "", "<|x", ""]


def test_a_stop_string_may_begin_inside_an_earlier_candidate() -> None:
    pieces, stopped = spell("aabaabaaab", stop=["aaab"])
    assert ("".join(pieces), stopped) == ("aabaab", "aaab")


def test_held_back_text_is_given_at_the_end() -> None:
    pieces, stopped = spell("so it ends <|en", stop=["<|end|>"])
    assert ("".join(pieces), stopped) == ("so it ends <|en", None)


@pytest.mark.parametrize(
    ("stop", "stopped", "text"),
    [
        (["three", "two"], "two", "one "),  # in the order of the text, not of the list
        (["o", "two", " two"], "o", ""),
        (["two", " two", "o thr"], " two", "one"),  # both end at one character: the longer
        (["e two", "wo"], "e two", "on"),
        (["two th", "wo t"], "wo t", "one t"),  # one ends before the other
    ],
)
def test_the_stop_string_that_is_complete_first_wins(stop: list[str], stopped: str, text: str) -> None:
    for words in ("one two three", ["one two three"], ["one t", "wo t", "hree"]):
        pieces, found = spell(words, stop=stop)
        assert ("".join(pieces), found) == (text, stopped)


def test_a_token_may_complete_a_stop_string_and_go_on() -> None:
    """The prompt's text does not count; the token's own text does (vllm#3572)."""
    backend = make_backend("llama3")
    backend.add_tokens(["ABC", "DEF"])
    prompt, token = [backend.token_to_id("ABC")], backend.token_to_id("DEF")
    text = Tokenizer(backend).output_text(SamplingParams(stop="DE"), prompt)
    assert text.append(token) == "DE"
    assert text.close() == ""


def test_a_stop_string_that_the_prompt_began_is_none() -> None:
    tokenizer = Tokenizer(make_backend("llama3"))
    ids = tokenizer._backend.encode("ABCDEF", add_special_tokens=False).ids
    for echo in (False, True):
        text = tokenizer.output_text(SamplingParams(stop=("CD", "AB", "B"), echo=echo), ids[:3])
        assert [text.append(token) for token in ids[3:]] == [None] * 3
        assert text.close() == ("ABCDEF" if echo else "DEF")


def test_the_text_may_end_with_the_stop_string() -> None:
    words = ["one", " t", "wo", "!three"]
    pieces, stopped = spell(words, stop=["two!"], include_stop_str_in_output=True)
    assert (pieces, stopped) == (["one", " ", "", "two!", ""], "two!")


def test_a_stop_string_within_the_first_tokens_does_not_count() -> None:
    """vLLM's rule: it counts if it ends behind the first `min_tokens`, wherever it began."""
    words = ["a.", "b", ".", "c.", "d"]
    results = [spell(words, stop=["."], min_tokens=least) for least in range(6)]
    assert ["".join(pieces) for pieces, _ in results] == ["a", "a.b", "a.b", "a.b.c", "a.b.c.d", "a.b.c.d"]
    assert [stopped for _, stopped in results] == [*["."] * 4, None, None]


def test_a_stop_string_may_begin_within_the_first_tokens() -> None:
    pieces, stopped = spell(["a", "<|", "end|>"], stop=["<|end|>"], min_tokens=2)
    assert (pieces, stopped) == (["a", "", "", ""], "<|end|>")


def test_a_stop_string_may_begin_in_a_token_behind_one_that_is_ignored() -> None:
    pieces, stopped = spell(["ab, a", "b"], stop=["ab"], min_tokens=1)
    assert (pieces, stopped) == (["ab, ", "", ""], "ab")


def test_overlapping_an_ignored_stop_string_is_enough() -> None:
    pieces, stopped = spell(["a", "b", "a", "b", "a"], stop=["aba"], min_tokens=3)
    assert ("".join(pieces), stopped) == ("ab", "aba")


def test_special_tokens_stop_the_text_where_they_are_shown() -> None:
    tokenizer = Tokenizer(make_backend("llama3"))
    end = tokenizer._backend.token_to_id("<|im_end|>")
    for skip, expected in ((True, None), (False, "_end|>")):
        params = SamplingParams(stop="_end|>", skip_special_tokens=skip)
        text = tokenizer.output_text(params)
        assert text.append(end) == expected
        assert text.close() == ("" if skip else "<|im")


def test_an_echoed_prompt_comes_with_the_first_text() -> None:
    words = ["", "one", " two"]
    output = make_text(words, prompt_text="Count: ", echo=True)
    assert output.take() == ""
    assert pieces_of(output, range(3)) == ["", "Count: one", " two", ""]


def test_an_echoed_prompt_is_all_there_is_of_an_output_without_text() -> None:
    assert make_text([], prompt_text="Count: ", echo=True).close() == "Count: "
    assert make_text([], prompt_text="Count: ").close() == ""


def test_an_echoed_prompt_is_no_place_for_a_stop_string() -> None:
    output = make_text(["e two ", "one"], prompt_text="one t on", echo=True, stop=("one", "t"))
    assert output.append(0) == "t"
    assert output.close() == "one t one "


@pytest.mark.parametrize("skip", [True, False])
def test_an_echoed_prompt_is_its_own_decoding(skip: bool) -> None:
    tokenizer = Tokenizer(make_backend("llama3"))
    prompt = tokenizer._backend.encode("The<|im_end|>corn").ids
    text = tokenizer.output_text(SamplingParams(echo=True, skip_special_tokens=skip), prompt).close()
    assert text == ("Thecorn" if skip else "<s>The<|im_end|>corn")


def test_the_end_of_an_unfinished_character_is_not_searched() -> None:
    """The generation has ended for another reason already."""
    output = make_text(["a"], stop=["�"], unfinished="�")
    assert output.append(0) is None
    assert output.close() == "a�"


def test_nothing_changes_behind_a_stop_string() -> None:
    output = make_text(["one. ", "two"], stop=["."])
    assert [output.append(0), output.append(1)] == [".", "."]
    assert (output.take(), output.take(), output.close()) == ("one", "", "")


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=4)
AB = st.text(alphabet="ab", min_size=1, max_size=5)


@given(
    words=st.lists(st.text(alphabet="ab", max_size=4), max_size=14),
    stop=st.lists(AB, max_size=4),
    min_tokens=st.integers(0, 8),
    include=st.booleans(),
    takes=st.sets(st.integers(0, 14)),
)
def test_pieces_taken_at_any_time_make_up_the_text_that_was_asked_for(
    words: list[str], stop: list[str], min_tokens: int, include: bool, takes: set[int]
) -> None:
    output = make_text(words, stop=stop, min_tokens=min_tokens, include_stop_str_in_output=include)
    expected, stopped = cut(words, stop, min_tokens=min_tokens, include=include)
    shown, found = "", None
    for number in range(len(words)):
        found = output.append(number)
        if number in takes:
            shown += output.take()
            assert expected.startswith(shown)
    assert (shown + output.close(), found) == (expected, stopped)


@given(words=st.lists(st.text(alphabet="ab", max_size=4), max_size=14), stop=st.lists(AB, max_size=4))
def test_no_more_is_held_back_than_must_be(words: list[str], stop: list[str]) -> None:
    output = make_text(words, stop=stop)
    text = shown = ""
    for number, word in enumerate(words):
        if output.append(number) is not None:
            return
        text += word
        shown += output.take()
        begun = [string[:size] for string in stop for size in range(1, len(string))]
        held = max((len(part) for part in begun if text.endswith(part)), default=0)
        assert shown == text[: len(text) - held]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(make_backend(kind))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_stop_strings_cut_from_the_text_of_real_tokens(kind: str, data: st.DataObject) -> None:
    """Any Unicode, any tokens, any stop strings that occur in it: the same as by the plain way."""
    tokenizer = tokenizer_of(kind)
    text = data.draw(
        st.text(st.characters(codec="utf-8") | st.sampled_from("ď🌊é the\u200d👩🏽"), max_size=24)
    )
    ids = tokenizer._backend.encode(text, add_special_tokens=False).ids
    ids += data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8))
    at = data.draw(st.integers(0, len(ids)))
    *words, end = pieces_of(tokenizer.output_text(SamplingParams(), ids[:at]), ids[at:])
    whole = "".join(words)
    spans = data.draw(SPANS)
    stop = tuple({whole[start : start + size] for start, size in spans if start < len(whole)})
    least, include = data.draw(st.integers(0, 6)), data.draw(st.booleans())
    params = SamplingParams(stop=stop, min_tokens=least, include_stop_str_in_output=include)
    output = tokenizer.output_text(params, ids[:at])
    takes = data.draw(st.integers(0, 2**16 - 1))
    shown, found = "", None
    for number, token in enumerate(ids[at:]):
        found = output.append(token)
        if takes >> number % 16 & 1:
            shown += output.take()
    expected, stopped = cut(words, stop, min_tokens=least, include=include)
    assert (shown + output.close(), found) == (expected + ("" if stopped else end), stopped)
