# ruff: noqa: RUF001 - the punctuation of many languages is meant
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.producer.factories import ENGLISH, byte_level_bpe, make_text, metaspace_unigram
from tidemill_producer.splitting import Splitter, load_tokenizer

TOKENIZERS = {"byte-level": byte_level_bpe, "metaspace": metaspace_unigram}
FAMILY = "👩\u200d👩\u200d👧"
AWKWARD = (" ", "\n", "\n\n", ".", "! ", "。", "e.g. ", "# Head\n", "- ", "é", "e\u0301", FAMILY, "水", "ﷺ")


def make_splitter(kind: str = "byte-level") -> Splitter:
    return Splitter(load_tokenizer(TOKENIZERS[kind]().to_str().encode()))


def squeezed(*texts: str) -> str:
    return "".join("".join(text.split()) for text in texts)


def chunks_of(text: str, limit: int) -> list[str]:
    return list(make_splitter().split(text, limit))


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=8)), max_size=60).map("".join),
    limit=st.integers(40, 90),
)
def test_chunks_hold_the_text_and_fit(kind: str, text: str, limit: int) -> None:
    splitter = make_splitter(kind)

    chunks = list(splitter.split(text, limit))

    assert squeezed(*chunks) == squeezed(text)
    assert all(chunk and chunk == chunk.strip() for chunk in chunks)
    assert all(splitter.count(chunk) <= limit for chunk in chunks)


def test_a_text_that_fits_is_one_chunk() -> None:
    assert chunks_of(f"\n {ENGLISH}", 500) == [ENGLISH.strip()]


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_nothing_gives_no_chunk(text: str) -> None:
    assert chunks_of(text, 10) == []


def test_chunks_end_at_paragraphs_where_they_can() -> None:
    chunks = chunks_of(make_text(40, paragraph=3), 300)

    assert len(chunks) > 3
    assert all(chunk.endswith("was high.") for chunk in chunks)
    assert all(int(chunk.split()[2]) % 3 == 1 for chunk in chunks), "each begins a paragraph"


def test_chunks_end_at_sentences_where_paragraphs_are_too_long() -> None:
    chunks = chunks_of(make_text(60, paragraph=60), 300)

    assert len(chunks) > 3
    assert all(chunk.endswith(".") and chunk.startswith("Sentence") for chunk in chunks)


@pytest.mark.parametrize(
    ("unit", "end"),
    [
        ("潮水每天来两次，磨坊的轮子就转两次。", "。"),
        ("粉を挽きますか？", "？"),
        ("ज्वार दिन में दो बार आता है। ", "।"),
        ("هل تدور العجلة؟ ", "؟"),
        ("Wait for the next tide! ", "!"),
        ("Что делает мельник, т.е. хозяин? ", "?"),
        ('He said "it turns." ', '"'),
        ("see e.g. the wheel of 3.14 metres. ", "."),
        ("- flour\n", "flour"),
        ("1. grain\n", "grain"),
    ],
)
def test_sentences_end_as_their_language_ends_them(unit: str, end: str) -> None:
    unit_tokens = make_splitter().count(unit)
    text = unit.capitalize() * 30

    chunks = chunks_of(text, unit_tokens * 5 + unit_tokens // 2)

    assert len(chunks) > 4
    assert all(chunk.endswith(end) for chunk in chunks)
    assert all(len(chunk) >= 2 * len(unit.strip()) for chunk in chunks)


def test_a_heading_begins_a_chunk() -> None:
    section = "{} Part\nThe wheel turns and the grain is ground and the flour is carried out today.\n"
    chunks = chunks_of((section.format("#") + section.format("##")) * 10, 120)

    assert len(chunks) > 4
    assert all(chunk.startswith("#") for chunk in chunks)


def test_a_sentence_past_the_limit_ends_at_words() -> None:
    text = " ".join(f"word{number}" for number in range(400))

    chunks = chunks_of(text, 50)

    assert [word for chunk in chunks for word in chunk.split()] == text.split()


def test_a_word_past_the_limit_is_cut_between_characters_only() -> None:
    chunks = chunks_of(FAMILY * 30, 80)

    assert "".join(chunks) == FAMILY * 30
    assert all(len(chunk) % len(FAMILY) == 0 for chunk in chunks)


def test_the_last_two_chunks_share_what_is_left() -> None:
    splitter = make_splitter()
    text = make_text(21, paragraph=100)
    limit = splitter.count(make_text(20, paragraph=100))

    counts = [splitter.count(chunk) for chunk in splitter.split(text, limit)]

    assert len(counts) == 2
    assert min(counts) > limit // 3


def test_a_character_that_cannot_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"'水' alone takes 3 of 2 tokens"):
        chunks_of("水", 2)


def test_a_tokenizer_that_truncates_still_counts_all() -> None:
    """A worker may have saved its tokenizer with truncation or padding on."""
    tokenizer = byte_level_bpe().from_str(byte_level_bpe().to_str())
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=4096)

    splitter = Splitter(load_tokenizer(tokenizer.to_str().encode()))

    assert splitter.count(ENGLISH) == make_splitter().count(ENGLISH) > 8


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["." * 400_000, "a" * 400_000, " \n" * 200_000 + "a", ". a" * 130_000])
def test_cost_grows_with_the_text_only(text: str) -> None:
    """Anything quadratic here would take many minutes."""
    assert squeezed(*chunks_of(text, 2000)) == squeezed(text)
