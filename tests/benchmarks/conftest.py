"""A server for what is measured through the queue."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.tidemill.servers import Server, running, valkey_binary
from tests.worker.factories import Place


@pytest.fixture(scope="session")
def valkey() -> Iterator[Server]:
    with running(valkey_binary()) as server:
        yield server


@pytest.fixture
def place(valkey: Server) -> Place:
    """A queue of this test's own."""
    return Place(valkey.url, f"tiny-{uuid.uuid4().hex}")
