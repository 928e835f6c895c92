"""What every test process starts from: one quiet compute thread, a clean environment, a real model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

COMPUTE = {
    # Two test processes share two cores: threads that spin while they wait would fight over them.
    # Read when torch, MKL and numba's OpenMP layer are loaded, so set before the first test is.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # What is compared bit by bit is the CPU's arithmetic, on a machine with a GPU too.
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Runs before any test module is imported, in this process and in each of pytest-xdist's."""
    for name in [name for name in os.environ if name.startswith("TIDEMILL_") or name == "REDIS_URL"]:
        del os.environ[name]
    os.environ.update(COMPUTE)
    # A shell has what it starts in the background ignore interrupts; all that tests start would do so too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """A worker's command takes over signals and logs of its process, which here is that of all tests."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def smollm2_folder(pytestconfig: pytest.Config) -> Path:
    """The real SmolLM2, converted once and kept in pytest's own cache."""
    from tidemill_worker.model.checkpoint import locate_embedded

    assert pytestconfig.cache is not None
    return locate_embedded(pytestconfig.cache.mkdir("tidemill-models"))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """For what must not depend on how many threads share a tensor out."""
    import torch  # not before `pytest_configure` has spoken

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
