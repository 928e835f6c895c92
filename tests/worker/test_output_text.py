"""Incremental text: whole characters, no token twice, stop strings wherever tokens are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.factories import byte_fallback_backend, byte_level_backend
from tidemill_worker.output_text import StoppedText
from tidemill_worker.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(byte_level_backend())
BYTE_FALLBACK = Tokenizer(byte_fallback_backend())
TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"]
)


class Characters:
    """A decoder whose tokens are characters, so that a test can spell what is generated."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def pieces_of(text: StoppedText, token_ids: Sequence[int]) -> list[str]:
    """What a reader is shown, piece by piece, until the end or a stop string."""
    pieces = []
    for token_id in token_ids:
        stopped = text.append(token_id)
        pieces.append(text.take())
        if stopped is not None:
            break
    return [*pieces, text.close()]


def spell(text: str, *, stop: Sequence[str]) -> tuple[list[str], str | None]:
    output = StoppedText(Characters(), stop)
    pieces = pieces_of(output, [ord(character) for character in text])
    return pieces, output.append(ord("x"))


def cut(text: str, stops: Sequence[str]) -> str:
    """The specification: read character by character, end before the first stop completed."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@TOKENIZERS
@given(data=st.data())
def test_pieces_make_up_the_decoding_of_all_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any tokens at all, valid text or not, decode to the same in pieces and at once (vllm#17448)."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert "".join(pieces_of(tokenizer.output_text(), ids)) == tokenizer.decode(ids)


@TOKENIZERS
@given(text=st.text(max_size=60))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer._backend.encode(text, add_special_tokens=False).ids
    assert "".join(pieces_of(tokenizer.output_text(), ids)) == tokenizer.decode(ids)


@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="�"), max_size=60))
def test_no_piece_holds_half_a_character(text: str) -> None:
    """ "ď" over two tokens must not become two replacement characters (vllm-mlx#109)."""
    ids = BYTE_LEVEL._backend.encode(text, add_special_tokens=False).ids
    assert "�" not in "".join(pieces_of(BYTE_LEVEL.output_text(), ids))


@settings(deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_survives_smollm2(smollm2: Tokenizer, text: str) -> None:
    """SmolLM2's vocabulary lacks some bytes: whatever its own decoding is, the pieces make it up."""
    ids = smollm2._backend.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(smollm2.output_text(), ids)
    assert "".join(pieces) == smollm2.decode(ids)


@settings(deadline=None)
@given(data=st.data())
def test_any_tokens_of_smollm2(smollm2: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1) | st.integers(0, 300), max_size=40))
    assert "".join(pieces_of(smollm2.output_text(), ids)) == smollm2.decode(ids)


def test_a_character_appears_with_its_last_byte() -> None:
    ids = [BYTE_LEVEL._backend.token_to_id(token) for token in ("ð", "Ł", "Į", "Ĭ")]  # 🌊
    assert pieces_of(BYTE_LEVEL.output_text(), ids) == ["", "", "", "🌊", ""]


def test_an_unfinished_character_is_shown_as_broken_at_the_end() -> None:
    ids = [BYTE_LEVEL._backend.token_to_id(token) for token in ("A", "ð", "Ł")]
    assert pieces_of(BYTE_LEVEL.output_text(), ids) == ["A", "", "", "�"]


def test_spaces_between_words_are_kept() -> None:
    """A decoder that strips the first space must strip only that of the whole text."""
    ids = [BYTE_FALLBACK._backend.token_to_id(token) for token in ("▁the", "▁tide", "▁", "▁mill")]
    assert pieces_of(BYTE_FALLBACK.output_text(), ids) == ["the", " tide", " ", " mill", ""]


def test_special_tokens_leave_no_trace() -> None:
    ids = [BYTE_FALLBACK._backend.token_to_id(token) for token in ("▁the", "<eos>", "▁tide")]
    assert "".join(pieces_of(BYTE_FALLBACK.output_text(), ids)) == "the tide"


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


def test_a_token_may_complete_a_stop_string_and_go_on() -> None:
    """The prompt's text does not count; the token's own text does (vllm#3572)."""
    backend = byte_level_backend()
    backend.add_tokens(["DEF"])
    text = Tokenizer(backend).output_text(["DE"])
    assert text.append(backend.token_to_id("DEF")) == "DE"
    assert text.close() == ""


def test_a_stop_string_within_a_character_run_is_found_at_the_end_of_the_run() -> None:
    """Byte tokens read as one run: "é" of two bytes must stop the text too."""
    ids = [BYTE_FALLBACK._backend.token_to_id(token) for token in ("▁the", "<0xC3>", "<0xA9>", "s")]
    text = BYTE_FALLBACK.output_text(["é"])
    assert [text.append(token_id) for token_id in ids] == [None, None, None, "é"]
    assert text.close() == "the"


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
    cuts=st.sets(st.integers(0, 30)),
)
def test_stop_strings_do_not_depend_on_how_tokens_are_cut(
    text: str, stops: list[str], cuts: set[int]
) -> None:
    bounds = sorted({0, len(text), *(at for at in cuts if at < len(text))})
    words = [text[a:b] for a, b in pairwise(bounds)]

    class Words(Characters):
        def push(self, token_id: int) -> str:
            return words[token_id]

    pieces = pieces_of(StoppedText(Words(), stops), range(len(words)))
    assert "".join(pieces) == cut(text, stops)


@given(text=st.text(alphabet="abc", max_size=30), stop=st.text(alphabet="abc", min_size=1, max_size=4))
def test_nothing_shown_is_ever_taken_back(text: str, stop: str) -> None:
    pieces, _ = spell(text, stop=[stop])
    shown = ""
    for piece in pieces:
        shown += piece
        assert cut(text, [stop]).startswith(shown)
