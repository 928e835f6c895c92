from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.tidemill.servers import Server, running, valkey_binary


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running(valkey_binary()) as server:
        yield server


@pytest.fixture
def queue() -> str:
    """A queue that no other test has seen."""
    return f"test-{uuid.uuid4().hex}"
