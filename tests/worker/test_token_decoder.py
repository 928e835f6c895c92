"""Text of tokens as they come: what the tokenizer's own decoding of all of them says, behind the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders

from tests.worker.tiny_tokenizers import BYTE_FALLBACK, BYTES, KINDS, make_backend
from tidemill.errors import ModelUnsupported
from tidemill.params import SamplingParams
from tidemill_worker.output_text import StoppedText
from tidemill_worker.tokenizer import Tokenizer

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
EVERY_BYTE_KIND = pytest.mark.parametrize("kind", ["gpt2", "llama3", *BYTE_FALLBACK])
CHARACTER = st.characters(codec="utf-8", exclude_characters="�") | st.sampled_from(
    "ď🌊é\u0301\u200d👩👧🏽の水 \n\t▁Ġ'.<>"  # combining and joined ones, what vocabularies use as marks
)
UNICODE = st.text(CHARACTER)
QUICK = settings(deadline=None, max_examples=60)


@cache
def backend_of(kind: str) -> RustTokenizer:
    return make_backend(kind)


@cache
def byte_tokens(kind: str) -> frozenset[int]:
    return frozenset(ids_of(kind, *BYTES)) if kind in BYTE_FALLBACK else frozenset()


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(make_backend(kind))


def ids_of(kind: str, *tokens: str) -> list[int]:
    ids = [backend_of(kind).token_to_id(token) for token in tokens]
    assert None not in ids, tokens
    return ids


def bytes_of(kind: str, text: str | bytes) -> list[int]:
    """`text` in the tokens of single bytes that the vocabulary has."""
    data = text.encode() if isinstance(text, str) else text
    if kind in BYTE_FALLBACK:
        return ids_of(kind, *(BYTES[byte] for byte in data))
    single = {tokenizer_of(kind).token_bytes(i): i for i in range(backend_of(kind).get_vocab_size())}
    return [single[bytes([byte])] for byte in data]


def pieces_of(output: StoppedText, token_ids: Sequence[int]) -> list[str]:
    pieces = []
    for token_id in token_ids:
        output.append(token_id)
        pieces.append(output.take())
    return [*pieces, output.close()]


def text_behind(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], **params: bool) -> str:
    return "".join(pieces_of(tokenizer.output_text(SamplingParams(**params), prompt), output))


@st.composite
def token_ids(draw: st.DrawFn, kind: str, *, max_size: int = 24) -> list[int]:
    """Any tokens: control tokens, unknown ids, bytes in any order that is UTF-8 when all are there."""
    backend = backend_of(kind)
    size = backend.get_vocab_size() + 3
    one = st.sampled_from([[token] for token in range(size) if token not in byte_tokens(kind)])
    special = st.sampled_from([[token] for token in sorted(tokenizer_of(kind).special_tokens)])
    units = one | special
    if kind in BYTE_FALLBACK:
        units |= CHARACTER.map(lambda character: bytes_of(kind, character))
    return [token for unit in draw(st.lists(units, max_size=max_size)) for token in unit]


@EVERY_KIND
@given(data=st.data())
@QUICK
def test_prompt_and_output_together_are_the_decoding_of_all_tokens(kind: str, data: st.DataObject) -> None:
    """Cut anywhere, even within a character (vllm#17448)."""
    ids = data.draw(token_ids(kind))
    skip = data.draw(st.booleans())
    cut = data.draw(st.integers(0, len(ids)))
    text = text_behind(tokenizer_of(kind), ids[:cut], ids[cut:], skip_special_tokens=skip, echo=True)
    assert text == backend_of(kind).decode(ids, skip_special_tokens=skip)


@EVERY_KIND
@given(data=st.data())
@QUICK
def test_output_is_what_it_adds_to_the_decoding_of_the_prompt(kind: str, data: st.DataObject) -> None:
    ids = data.draw(token_ids(kind))
    skip = data.draw(st.booleans())
    cut = data.draw(st.integers(0, len(ids)))
    prompt = backend_of(kind).decode(ids[:cut], skip_special_tokens=skip)
    whole = backend_of(kind).decode(ids, skip_special_tokens=skip)
    assume(whole.startswith(prompt))
    text = text_behind(tokenizer_of(kind), ids[:cut], ids[cut:], skip_special_tokens=skip)
    assert text == whole[len(prompt) :]


@EVERY_KIND
@given(data=st.data())
@QUICK
def test_the_end_of_a_prompt_is_all_that_matters_of_it(kind: str, data: st.DataObject) -> None:
    ids = data.draw(token_ids(kind))
    cut = data.draw(st.integers(0, len(ids)))
    skip = data.draw(st.booleans())
    text = text_behind(tokenizer_of(kind), ids[:cut], ids[cut:], skip_special_tokens=skip)
    echoed = text_behind(tokenizer_of(kind), ids[:cut], ids[cut:], skip_special_tokens=skip, echo=True)
    assert echoed.endswith(text)


@EVERY_KIND
@given(text=UNICODE, data=st.data())
@QUICK
@example(text="👩‍👧🏽 naïve ďábel", data=None)
def test_any_text_survives(kind: str, text: str, data: st.DataObject | None) -> None:
    ids = backend_of(kind).encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(0, len(ids))) if data else len(ids) // 2
    assert text_behind(tokenizer_of(kind), ids[:cut], ids[cut:], echo=True) == backend_of(kind).decode(ids)


@EVERY_BYTE_KIND
@given(text=UNICODE, data=st.data())
@QUICK
def test_no_piece_holds_half_a_character(kind: str, text: str, data: st.DataObject) -> None:
    """ "ď" over two tokens must not become two replacement characters (vllm-mlx#109)."""
    data_of_all = ("a" + text).encode()
    ids = bytes_of(kind, data_of_all)
    cut = data.draw(st.integers(1, len(ids)))
    pieces = pieces_of(tokenizer_of(kind).output_text(SamplingParams(), ids[:cut]), ids[cut:])
    in_prompt = data_of_all[:cut].decode(errors="ignore")
    assert "".join(pieces) == ("a" + text)[len(in_prompt) :]
    assert not any("�" in piece for piece in pieces)


@EVERY_BYTE_KIND
def test_a_character_appears_with_its_last_byte(kind: str) -> None:
    output = tokenizer_of(kind).output_text(SamplingParams(), bytes_of(kind, "x"))
    assert pieces_of(output, bytes_of(kind, "a🌊é")) == ["a", "", "", "", "🌊", "", "é", ""]


@EVERY_BYTE_KIND
def test_an_unfinished_character_is_shown_as_broken_at_the_end(kind: str) -> None:
    output = tokenizer_of(kind).output_text(SamplingParams(), bytes_of(kind, "x"))
    assert pieces_of(output, bytes_of(kind, "a🌊")[:3]) == ["a", "", "", "�"]


@EVERY_BYTE_KIND
@given(data=st.binary(max_size=24), at=st.integers(0, 24))
@QUICK
def test_bytes_that_are_no_text_are_replaced_as_python_does(kind: str, data: bytes, at: int) -> None:
    """One U+FFFD for each maximal part of a character, wherever tokens and prompt end."""
    ids = bytes_of(kind, b"a" + data)
    assert text_behind(tokenizer_of(kind), ids[: at + 1], ids[at + 1 :], echo=True) == (b"a" + data).decode(
        errors="replace"
    )


@EVERY_BYTE_KIND
def test_a_character_that_the_prompt_began_belongs_to_the_output_that_finishes_it(kind: str) -> None:
    ids = bytes_of(kind, "a🌊b")
    for cut in (2, 3, 4):
        assert text_behind(tokenizer_of(kind), ids[:cut], ids[cut:]) == "🌊b"
        assert text_behind(tokenizer_of(kind), ids[:cut], ids[cut:], echo=True) == "a🌊b"


@EVERY_BYTE_KIND
@pytest.mark.parametrize("output", ["b", "é", ""])
def test_a_character_that_the_prompt_left_unfinished_leaks_nothing(kind: str, output: str) -> None:
    """It was broken before the output began, and is seen only where the prompt is."""
    prompt = bytes_of(kind, "a🌊")[:3]
    ids = bytes_of(kind, output)
    assert text_behind(tokenizer_of(kind), prompt, ids) == output
    assert text_behind(tokenizer_of(kind), prompt, ids, echo=True) == f"a�{output}"


@EVERY_BYTE_KIND
def test_an_unfinished_character_of_the_prompt_may_go_on_and_still_not_be_finished(kind: str) -> None:
    ids = bytes_of(kind, "a🌊")
    assert text_behind(tokenizer_of(kind), ids[:2], ids[2:4]) == ""
    assert text_behind(tokenizer_of(kind), ids[:2], [*ids[2:4], *bytes_of(kind, "!")]) == "!"


@EVERY_BYTE_KIND
def test_a_replacement_character_that_the_model_writes_is_text(kind: str) -> None:
    ids = bytes_of(kind, "a�b")
    assert text_behind(tokenizer_of(kind), ids[:2], ids[2:]) == "�b"


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
def test_characters_of_byte_tokens_do_not_wait_for_the_end_of_their_run(kind: str) -> None:
    output = tokenizer_of(kind).output_text(SamplingParams(stop=("é",)), bytes_of(kind, "x"))
    stops = [output.append(token) for token in bytes_of(kind, "ďé")]
    assert (stops, output.close()) == ([None, None, None, "é"], "ď")


@pytest.mark.parametrize("kind", ["llama2", "mistral", "unigram"])
def test_only_the_beginning_of_all_text_loses_its_space(kind: str) -> None:
    """Behind a prompt that shows nothing the output begins the text; behind any other it goes on."""
    word = ids_of(kind, "▁is", "▁is")
    assert text_behind(tokenizer_of(kind), [], word) == "is is"
    assert text_behind(tokenizer_of(kind), [1], word) == "is is"
    assert text_behind(tokenizer_of(kind), ids_of(kind, "t", *["<|im_end|>"] * 4), word) == " is is"
    assert text_behind(tokenizer_of(kind), [1], word, skip_special_tokens=False) == " is is"


@pytest.mark.parametrize("kind", ["llama2", "mistral", "unigram"])
def test_a_beginning_without_text_is_still_the_beginning(kind: str) -> None:
    space, word = ids_of(kind, "▁", "▁is")
    beyond = backend_of(kind).get_vocab_size()
    for prompt in ([], [beyond], [beyond, 1]):
        assert text_behind(tokenizer_of(kind), prompt, [beyond, word]) == "is"
        assert text_behind(tokenizer_of(kind), prompt, [space, word]) == " is"


def test_nothing_is_stripped_where_the_vocabulary_puts_nothing_in_front() -> None:
    assert text_behind(tokenizer_of("gemma"), [], ids_of("gemma", "▁is")) == " is"


def test_continuations_of_words_are_joined() -> None:
    ids = ids_of("wordpiece", "mill", "##s", ".")
    assert text_behind(tokenizer_of("wordpiece"), [], ids) == "mills."
    assert text_behind(tokenizer_of("wordpiece"), ids[:1], ids[1:]) == "s."


@EVERY_KIND
def test_special_tokens_are_shown_on_request(kind: str) -> None:
    if kind in ("gpt2", "wordlevel"):
        special = next(iter(sorted(tokenizer_of(kind).special_tokens)))
    else:
        special = ids_of(kind, "<|im_end|>")[0]
    name = backend_of(kind).id_to_token(special)
    ids = backend_of(kind).encode("The corn", add_special_tokens=False).ids
    whole = [*ids, special, *ids]
    assert name not in text_behind(tokenizer_of(kind), ids, whole)
    assert name in text_behind(tokenizer_of(kind), ids, whole, skip_special_tokens=False)


@EVERY_KIND
def test_the_pieces_of_tokens_make_up_the_text(kind: str) -> None:
    """What logprobs and grammars are told of tokens is what the text is made of."""
    tokenizer, backend = tokenizer_of(kind), backend_of(kind)
    ids = backend.encode("The mill isn't ďábel 🌊", add_special_tokens=False).ids
    prompt, output = ids[:1], ids[1:]
    pieces = b"".join(map(tokenizer.token_bytes, output))
    assert pieces.decode() == text_behind(tokenizer, prompt, output, skip_special_tokens=False)


@EVERY_KIND
def test_ids_that_only_the_model_has_are_no_text(kind: str) -> None:
    beyond = backend_of(kind).get_vocab_size() + 7
    assert text_behind(tokenizer_of(kind), [beyond], [beyond, beyond]) == ""
    assert tokenizer_of(kind).token_text(beyond) == ("", None)


@EVERY_BYTE_KIND
def test_a_token_that_is_no_whole_character_comes_with_its_bytes(kind: str) -> None:
    first, last = bytes_of(kind, "é")
    assert tokenizer_of(kind).token_text(first) == ("�", (0xC3,))
    assert tokenizer_of(kind).token_text(last) == ("�", (0xA9,))
    assert tokenizer_of(kind).token_text(bytes_of(kind, "a")[0]) == ("a", None)


def test_token_text_keeps_spaces_and_spells_special_tokens() -> None:
    assert tokenizer_of("llama2").token_text(*ids_of("llama2", "▁is")) == (" is", None)
    assert tokenizer_of("llama3").token_text(*ids_of("llama3", "<|im_end|>")) == ("<|im_end|>", None)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("▁", " ")]),
    ],
    ids=["ctc", "bpe-suffix", "replace-in-all", "strip-the-end", "byte-level-and-more"],
)
def test_a_decoder_that_looks_at_more_than_a_token_is_refused(decoder: decoders.Decoder) -> None:
    backend = make_backend("llama2")
    backend.decoder = decoder
    with pytest.raises(ModelUnsupported, match="cannot be followed token by token"):
        Tokenizer(backend)


@QUICK
@given(text=UNICODE, data=st.data())
def test_any_text_survives_smollm2(smollm2: Tokenizer, text: str, data: st.DataObject) -> None:
    """SmolLM2's vocabulary lacks some bytes: whatever its own decoding is, the pieces make it up."""
    ids = smollm2._backend.encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(0, len(ids)))
    assert text_behind(smollm2, ids[:cut], ids[cut:], echo=True) == smollm2._backend.decode(ids)


@QUICK
@given(data=st.data())
def test_any_tokens_of_smollm2(smollm2: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1) | st.integers(0, 300), max_size=40))
    skip = data.draw(st.booleans())
    cut = data.draw(st.integers(0, len(ids)))
    text = text_behind(smollm2, ids[:cut], ids[cut:], skip_special_tokens=skip, echo=True)
    assert text == smollm2._backend.decode(ids, skip_special_tokens=skip)
