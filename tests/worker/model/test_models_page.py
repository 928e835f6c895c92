"""`docs/models.md` says what the tests hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.worker.model.architectures import ARCHITECTURES, Architecture
from tests.worker.model.refused import REFUSED

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def rows(heading: str) -> dict[str, str]:
    """The table under a heading: what stands beside each architecture."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([\w-]+)`[^|]*\|([^|]*)\|$", section, re.MULTILINE)
    assert len(found) == len(dict(found)), f"{heading}: an architecture is there twice"
    return {name: note.strip() for name, note in found}


def test_the_page_lists_what_is_tested() -> None:
    assert set(rows("Served and tested")) == {each.model_type for each in ARCHITECTURES.values()}


def test_the_page_lists_what_is_refused() -> None:
    refused = rows("Refused")
    assert set(refused) == set(REFUSED)
    assert all(refused.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda each: each.name)
def test_the_page_says_what_is_particular(architecture: Architecture) -> None:
    note = rows("Served and tested")[architecture.model_type]
    assert ("experts" in note) == architecture.moe
    assert ("softcap" in note) == (architecture.softcap is not None)
    assert ("sinks" in note) == architecture.sinks
    assert ("learned positions" in note) == (not architecture.rotary)
    if architecture.window is not None:
        assert "sliding windows" in note
