"""What in a worker's log is a complaint, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker_logs import complaints


def complaints_of(text: str, folder: Path, expected: tuple[str, ...] = ()) -> list[str]:
    log = folder / "worker-0.log"
    log.write_text(text)
    return complaints([log], expected)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("level=info event=a\nlevel=error event=b\n", "level=error event=b"),
        ("level=critical event=b\n", "level=critical event=b"),
        ("level=ERROR logger=asyncio event='c'\n", "level=ERROR logger=asyncio event='c'"),
        ("Traceback (most recent call last):\n  File x\n", "Traceback (most recent call last):"),
        ("Exception ignored in: f\nTraceback (most\n  File x\n", "Exception ignored in: f Traceback (most"),
    ],
)
def test_an_error_is_one(text: str, complaint: str, tmp_path: Path) -> None:
    assert complaints_of(text, tmp_path) == [f"worker-0.log: {complaint}"]


@pytest.mark.parametrize("text", ["", "level=warning event=lease_lost job=error-1\n"])
def test_anything_else_is_none(text: str, tmp_path: Path) -> None:
    assert complaints_of(text, tmp_path) == []


def test_what_is_expected_is_none(tmp_path: Path) -> None:
    text = "level=error event=not_handed_back\nlevel=error event=engine_failed\n"
    (found,) = complaints_of(text, tmp_path, ("event=not_handed_back",))
    assert "engine_failed" in found
