"""The soak ends with an exit status, its folder is kept or removed, and nobody need give up by design."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import soak
from soak import MAX_ATTEMPTS, PATIENCE, SETTINGS, Soak
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
    assert '"kills": 150' in (tmp_path / "figures.json").read_text()


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(lost=[JobId("a")]),
        Verdict(duplicated=[JobId("a")]),
        Verdict(wrong={JobId("a"): "text"}),
        Verdict(buried=[JobId("a")]),
        Verdict(left=["leases"]),
        Verdict(odd=["worker-0.log: ended by itself"]),
    ],
)
def test_any_other_soak_fails_and_keeps_its_files(
    verdict: Verdict, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_with(verdict, monkeypatch)
    with pytest.raises(SystemExit, match=str(folder)):
        soak.main()
    assert folder.exists()


def test_no_job_waits_for_its_attempts_until_its_clients_give_up() -> None:
    """Between two of them: none after the first failure, then `backoff`, doubled each time."""
    pauses = [SETTINGS.backoff * 2**number for number in range(MAX_ATTEMPTS - 2)]
    assert sum(min(pause, SETTINGS.max_backoff) for pause in pauses) < PATIENCE * 0.6
