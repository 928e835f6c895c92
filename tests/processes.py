"""Processes that tests start."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import AnyStr


@contextmanager
def confined(process: subprocess.Popen[AnyStr]) -> Iterator[subprocess.Popen[AnyStr]]:
    """It does not outlive the block, however that ends."""
    with process:
        try:
            yield process
        finally:
            process.kill()
