"""Models by their id on the Hugging Face hub, or in the cache that its client keeps on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from tidemill.errors import ModelUnsupported

FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "chat_template*",
)
"""What a model is loaded from; other formats of the same weights, and code, stay where they are."""
CONFIG_FILES = ("config.json",)
"""What it can be described by."""


def is_hub_id(model: str) -> bool:
    """Whether `model` reads like `organization/name`, and not like a file."""
    return (
        not model.endswith(".gguf")
        and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model) is not None
    )


def download(model: str, files: Sequence[str] = FILES) -> Path:
    """Return the folder of the client's cache that holds these files of `model`, fetched if need be.

    Where the cache lies, which server is asked and with what token are the client's own settings
    (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`).

    Raises:
        ModelUnsupported: if it is neither here nor to be had.
    """
    try:
        return Path(snapshot_download(model, allow_patterns=list(files), ignore_patterns=["*/*"]))
    except Exception as error:  # also those of the HTTP client below, which have no common base with OSError
        raise ModelUnsupported(f"model: {model!r} is no folder here, and {_reason(error)}") from error


def is_cached(model: str) -> bool:
    """Whether the client's cache holds at least the configuration of `model`; nothing is fetched."""
    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _reason(error: Exception) -> str:
    match error:
        case GatedRepoError():
            return "on the hub it is gated: ask for access on its page, then set HF_TOKEN"
        case RepositoryNotFoundError():
            return "the hub has no such model, or none that HF_TOKEN gives access to"
        case LocalEntryNotFoundError():
            return "the hub cannot be reached, nor does the cache of earlier downloads hold all of it"
        case _:
            return f"the hub does not give it: {(str(error).splitlines() or [type(error).__name__])[0]}"
