"""Models by their hub id: from the cache that is here, or with a clear word about why not."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from tests.worker.model.factories import load, make_tiny_llama
from tidemill.errors import ModelUnsupported
from tidemill_worker.model import hub
from tidemill_worker.model.checkpoint import locate, locate_config
from tidemill_worker.model.hub import is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOT_HERE = "the hub cannot be reached, nor does the cache of earlier downloads hold all of it"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The client's cache of downloads, empty."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client may go out, but nobody listens there."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def fill(cache: Path) -> Path:
    """Lay out a downloaded `someone/tiny` the way the client does."""
    repository = cache / "models--someone--tiny"
    snapshot = repository / "snapshots" / COMMIT
    make_tiny_llama(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize(
    ("model", "is_id"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("someone/tiny_v1.5", True),
        ("gpt2", False),
        ("no/such/folder", False),
        ("../folder", False),
        ("/models/tiny", False),
        ("./tiny", False),
        ("~/tiny", False),
        ("models/tiny.gguf", False),
    ],
)
def test_an_id_is_told_from_a_path(model: str, is_id: bool) -> None:
    assert is_hub_id(model) == is_id


def test_what_the_cache_holds_is_served_offline(cache: Path, tmp_path: Path) -> None:
    snapshot = fill(cache)
    assert locate("someone/tiny", tmp_path) == snapshot
    load(snapshot)


@pytest.mark.usefixtures("unreachable")
def test_what_the_cache_holds_is_served_when_the_hub_is_away(cache: Path, tmp_path: Path) -> None:
    snapshot = fill(cache)
    assert locate("someone/tiny", tmp_path) == snapshot


@pytest.mark.usefixtures("cache")
def test_offline_and_not_in_the_cache_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=f"model: 'someone/tiny' is no folder here, and {NOT_HERE}"):
        locate("someone/tiny", tmp_path)


@pytest.mark.usefixtures("cache", "unreachable")
def test_an_unreachable_hub_is_said_without_a_long_wait(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ModelUnsupported, match=NOT_HERE):
        locate("someone/tiny", tmp_path)
    assert time.monotonic() - started < 20  # not minutes of retries


def test_only_the_configuration_is_fetched_where_no_more_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value="/cache/tiny")
    monkeypatch.setattr(hub, "snapshot_download", asked)
    assert locate_config("someone/tiny") == Path("/cache/tiny")
    assert asked.call_args.kwargs["allow_patterns"] == ["config.json"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GatedRepoError, "on the hub it is gated: ask for access on its page, then set HF_TOKEN"),
        (RepositoryNotFoundError, "the hub has no such model, or none that HF_TOKEN gives access to"),
    ],
)
def test_what_the_hub_does_not_give_is_said(
    error: type[RepositoryNotFoundError], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise error("many\nlines", response=Mock(headers={}))

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(ModelUnsupported, match=reason) as refused:
        hub.download("someone/tiny")
    assert "\n" not in str(refused.value)


def test_a_folder_of_that_name_comes_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = fill(cache)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(snapshot, tmp_path / "someone" / "tiny")
    assert locate("someone/tiny", tmp_path) == Path("someone/tiny")
