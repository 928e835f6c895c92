"""The soak ends with an exit status, and its folder is kept or removed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import soak
from soak import Soak
from soak_verdict import Verdict

from tidemill.jobs import JobId


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a soak without server and workers keeps its files."""
    place = tmp_path / "soak"
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(place))
    monkeypatch.setattr(soak, "running", lambda *_, **__: nullcontext())
    monkeypatch.setattr(soak, "WorkerProcesses", lambda *_, **__: nullcontext())
    monkeypatch.setattr(sys, "argv", ["soak.py", "--json", str(tmp_path / "figures.json")])
    return place


def end_with(verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: Soak, *_: object) -> tuple[Verdict, dict[str, float]]:
        return verdict, {"jobs": 1.0}

    monkeypatch.setattr(Soak, "run", run)


def test_a_clean_soak_leaves_nothing_but_its_figures(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_with(Verdict(), monkeypatch)
    soak.main()
    assert not folder.exists()
    assert '"kills": 100' in (tmp_path / "figures.json").read_text()


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(lost=[JobId("a")]),
        Verdict(duplicated=[JobId("a")]),
        Verdict(wrong={JobId("a"): "text"}),
        Verdict(left=["leases"]),
    ],
)
def test_any_other_soak_fails_and_keeps_its_files(
    verdict: Verdict, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_with(verdict, monkeypatch)
    with pytest.raises(SystemExit, match=str(folder)):
        soak.main()
    assert folder.exists()
