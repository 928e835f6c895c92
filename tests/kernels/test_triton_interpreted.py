"""The Triton kernels compute the right numbers, and touch no memory but their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

# In half precision weights and results are rounded to 11 bits, of values up to about 4.
TOLERANCES = {"half": 2e-3, "group-1": 2e-3, "group-8": 2e-3, "all-half": 2e-3}
ATTENTION = [
    "smollm2",
    "half",
    "one-head",
    "group-1",
    "group-4",
    "group-8",
    "group-20",
    "width-80",
    "width-13",
    "block-1",
    "block-100",
    "window",
    "window-1",
    "window-64",
    "window-unfilled",
    "softcap",
    "softcap-tiny",
    "softcap-large",
    "sinks",
    "all",
    "all-group-71",
    "all-half",
    "far",
]
WRITES = ["smollm2", "half", "bfloat", "width-13", "far"]


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.kernels.interpreted"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    parsed: dict[str, dict[str, Any]] = json.loads(run.stdout)
    return parsed


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(report: dict[str, dict[str, Any]], case: str) -> None:
    assert report["attention"][case] <= TOLERANCES.get(case, 2e-6)


@pytest.mark.parametrize("case", WRITES)
def test_kv_write(report: dict[str, dict[str, Any]], case: str) -> None:
    assert report["writes"][case]


def test_every_case_is_looked_at(report: dict[str, dict[str, Any]]) -> None:
    assert sorted(report["attention"]) == sorted(ATTENTION)
    assert sorted(report["writes"]) == sorted(WRITES)
