import pytest

from tidemill_producer.sentences import whole_sentences, without_repeats


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("It turns. It grinds the", "It turns."),
        ("It turns.", "It turns."),
        ("It grinds the", "It grinds the"),
        ("水が来る。粉を", "水が来る。"),
        ("", ""),
    ],
)
def test_a_cut_off_sentence_goes_if_another_is_left(text: str, whole: str) -> None:
    assert whole_sentences(text) == whole


@pytest.mark.parametrize(
    ("text", "once"),
    [
        ("It turns. It grinds. It turns.", "It turns. It grinds."),
        ("## Mill\n\n## Mill\n\n## Mill\n", "## Mill"),
        ("It turns.\n\nThe mill:\n- flour\n- Flour\n- grain", "It turns.\n\nThe mill:\n- flour\n- grain"),
        ("One. Two. Three.", "One. Two. Three."),
        ("A mill-wheel mill-wheel mill-wheel mill-wheel turns", "A mill-wheel turns"),
        (
            "Water flows to the mill to the mill to the mill to the mill again.",
            "Water flows to the mill again.",
        ),
        ("- !\n- !\n- !\n- !\nIt turns.", "- !\nIt turns."),
        ("Very very slow: 1 1 1 of 10.", "Very very slow: 1 1 1 of 10."),
        (" \n", ""),
    ],
)
def test_what_was_said_is_not_said_again(text: str, once: str) -> None:
    assert without_repeats(text) == once
