"""The promises of `conftest.py`, without which other tests would depend on the machine they run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).with_name("conftest.py")


def test_torch_computes_with_one_thread() -> None:
    assert torch.get_num_threads() == 1


def test_nothing_is_inherited_from_the_environment(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given settings of some other queue in the environment, when tests run, then they see none."""
    monkeypatch.setenv("REDIS_URL", "redis://production:6379/0")
    monkeypatch.setenv("TIDEMILL_MODEL", "another")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(
        """
        import os
        AT_IMPORT = dict(os.environ)

        def test_environment():
            assert not [name for name in AT_IMPORT if name.startswith("TIDEMILL_")]
            assert "REDIS_URL" not in AT_IMPORT
            assert AT_IMPORT["OMP_NUM_THREADS"] == "1"
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
    assert os.environ["REDIS_URL"], "the run was not given what it should have dropped"
