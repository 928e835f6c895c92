"""Where a model is found, and what is said when it is not, or when its copy cannot be kept."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from tests.worker.model.factories import load, make_tiny_llama
from tidemill.errors import ConfigurationError, ModelUnsupported
from tidemill_worker.model import checkpoint
from tidemill_worker.model.checkpoint import locate, locate_config


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    return path


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Writing beyond this fails as on a full disk, with an error number of its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def pretend_to_convert(gguf: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert locate(str(make_tiny_llama(tmp_path / "model")), tmp_path / "cache") == tmp_path / "model"


def test_a_configuration_is_found_where_there_is_no_more_than_that(gguf: Path, tmp_path: Path) -> None:
    """Nothing is converted, and there need not be weights."""
    (tmp_path / "config.json").write_text("{}")
    assert locate_config(str(tmp_path)) == tmp_path
    assert locate_config(str(tmp_path / "config.json")) == tmp_path
    assert locate_config(str(gguf)) == gguf
    with pytest.raises(ModelUnsupported, match=r"'missing\.gguf' is neither a \.gguf file nor a folder"):
        locate_config("missing.gguf")


@pytest.mark.parametrize("model", ["no/such/folder", "missing.gguf", "./meta-llama"])
def test_what_is_not_there_is_named(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=f"model: '{model}' is neither a .gguf file nor a folder"):
        locate(model, tmp_path)


def test_a_file_that_cannot_be_read_is_refused_and_leaves_nothing(gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=f"model: {gguf} cannot be converted: ") as refused:
        locate(str(gguf), tmp_path / "cache")
    assert "\n" not in str(refused.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_is_converted_once(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = Mock(side_effect=pretend_to_convert)
    monkeypatch.setattr(checkpoint, "_convert", convert)
    folder = locate(str(gguf), tmp_path / "cache")
    assert locate(str(gguf), tmp_path / "cache") == folder
    assert [call.args[0] for call in convert.call_args_list] == [gguf]

    # Another file under the same name is another model.
    gguf.write_bytes(b"GGUF" + bytes(999) + b"x")
    assert locate(str(gguf), tmp_path / "cache") != folder


def test_what_a_killed_conversion_left_is_removed(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as large as a model; and nobody would ever look at it."""
    convert = Mock(side_effect=pretend_to_convert)
    monkeypatch.setattr(checkpoint, "_convert", convert)
    folder = locate(str(gguf), tmp_path / "cache")
    folder.rename(convert.call_args.args[1])  # as if it had been killed just before the end
    assert locate(str(gguf), tmp_path / "cache") == folder
    assert list((tmp_path / "cache").iterdir()) == [folder]
    first, second = (call.args[1] for call in convert.call_args_list)
    assert second != first


def test_one_process_converts_while_others_wait(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    conversions: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        conversions.append(folder)
        descriptor = os.open(cache, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # as another process, that would wait here
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        pretend_to_convert(gguf, folder)

    def wait(descriptor: int, operation: int) -> None:
        """Meanwhile another process has converted it."""
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", flock)
            locate(str(gguf), cache)

    flock = fcntl.flock
    monkeypatch.setattr(checkpoint, "_convert", convert)
    monkeypatch.setattr(fcntl, "flock", wait)
    locate(str(gguf), cache)
    assert len(conversions) == 1


def test_a_file_system_without_locks_will_do(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others left is then left alone: they may still be at it."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EBADF, "no locks")))
    monkeypatch.setattr(checkpoint, "_convert", pretend_to_convert)
    folder = locate(str(gguf), cache)
    shutil.rmtree(folder)
    left = cache / f".{folder.name}-abc"
    left.mkdir()
    assert sorted(locate(str(gguf), cache).parent.iterdir()) == sorted([folder, left])


def test_a_full_disk_is_named_and_leaves_nothing(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(gguf: Path, folder: Path) -> None:
        (folder / "half").write_text("...")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_convert", run_out)
    with pytest.raises(ConfigurationError, match=r"cache_dir: .*MiB free\): No space left on device"):
        locate(str(gguf), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("limit", [10_000, 1_000_000])
def test_whoever_writes_says_disk_full_in_the_same_way(tmp_path: Path, limit: int) -> None:
    """Weights and tokenizer are written by Rust code, whose exceptions are no `OSError`."""
    model = load(make_tiny_llama(tmp_path / "model"))
    backend = RustTokenizer(models.WordLevel({f"word {n}": n for n in range(100_000)}, unk_token="word 0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    with files_no_larger_than(limit), pytest.raises(OSError, match="File too large"):
        checkpoint._save(model, tokenizer, tmp_path)


def test_a_folder_that_cannot_be_made_is_named(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ConfigurationError, match="cache_dir: cannot write to"):
        locate(str(gguf), tmp_path / "cache")


def test_whoever_converts_second_uses_the_first_copy(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_twice(gguf: Path, folder: Path) -> None:
        pretend_to_convert(gguf, folder)
        other = folder.parent / folder.name[1:].rsplit("-", 1)[0]
        if not other.exists():
            other.mkdir()
            pretend_to_convert(gguf, other)
            (other / "first").touch()

    monkeypatch.setattr(checkpoint, "_convert", convert_twice)
    folder = locate(str(gguf), tmp_path / "cache")
    assert (folder / "first").exists()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_bar_of_a_conversion_is_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with checkpoint._bar_for_people_only():
        print("50 %", file=sys.stderr)
    assert capsys.readouterr().err == "50 %\n" * terminal
