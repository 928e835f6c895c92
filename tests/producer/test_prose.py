import pytest

from tidemill_producer.prose import prose_of


@pytest.mark.parametrize(
    ("markup", "prose"),
    [
        ("The tide is high.\n\nThe mill turns.", "The tide is high.\n\nThe mill turns."),
        ("# Mill\n\nIt turns.\n\n## Wheel ##\nBig.", "Mill\n\nIt turns.\n\nWheel\nBig."),
        ("Mill\n====\n\nIt turns.", "Mill\n\nIt turns."),
        ('See [the tide](https://x.org "t") and [more][1].\n\n[1]: https://y', "See the tide and more."),
        ("[![CI](https://x/b.svg)](https://x)\n\nMill", "Mill"),
        ("* [Docs](https://x)\n* [Code](https://y)\n\nMill", "Mill"),
        ("A <b>big</b> mill<br/>.<!-- not\nthis -->", "A big mill."),
        ("Install:\n\n```sh\npip install mill\n```\n\nDone.", "Install:\n\nDone."),
        ("~~~\ncode\n~~~\nText", "Text"),
        ("Use ``mill`` or `wheel` **now**, __really__.", "Use mill or wheel now, really."),
        ("Read `the docs <https://x>`_ of :class:`Mill`.", "Read the docs of Mill."),
        ("Works with asyncio_ or trio_.", "Works with asyncio or trio."),
        (".. image:: x.png\n   :alt: badge\n\nMill", "Mill"),
        ("Example::\n\n    grind(corn)\n\nDone.", "Example:\n\nDone."),
        ("|build| |docs|\n\nMill", "Mill"),
        ("| a | b |\n|---|---|\n| 1 | 2 |", "| a | b |\n\n| 1 | 2 |"),
        ("See https://x.org/a for it.", "See  for it."),
        ("1 < 2 and a*b*c and 3 > 2 and x_y_z", "1 < 2 and a*b*c and 3 > 2 and x_y_z"),
    ],
)
def test_markup_goes_and_words_stay(markup: str, prose: str) -> None:
    assert prose_of(markup) == prose


def test_a_text_of_nothing_but_markup_stays() -> None:
    assert prose_of("```\ncode only\n```") == "```\ncode only\n```"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece",
    ["[", "![", "](", "<!--", "<a", "`", "**", "# ", "|a", " ", "\n..", "::\n ", "```\n~~~\n", "`a <"],
)
def test_cost_grows_with_the_text_only(piece: str) -> None:
    """Anything quadratic here would take many minutes."""
    assert prose_of(piece * (300_000 // len(piece)) + "x")
