"""The demo looks after what it has started."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager

import pytest

from tests.processes import confined
from tidemill.errors import TidemillError
from tidemill_worker.demo import _outcome


def python(program: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return confined(subprocess.Popen([sys.executable, "-c", program]))


def test_a_worker_that_dies_ends_the_demo() -> None:
    """Without it, `summarize` would wait for ever."""
    with (
        python("import time; time.sleep(100)") as summarize,
        python("raise SystemExit(3)") as worker,
        pytest.raises(TidemillError, match="the worker ended with status 3"),
    ):
        _outcome(summarize, worker)


def test_the_demo_ends_as_summarize_does() -> None:
    with python("raise SystemExit(1)") as summarize, python("import time; time.sleep(100)") as worker:
        assert _outcome(summarize, worker) == 1
