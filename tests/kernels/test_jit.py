"""Compiled code on disk is renewed when any source it was made of has changed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from tidemill_kernels.jit import digest


def make_module(path: Path, source: str) -> ModuleType:
    path.write_text(source)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    return module


def test_the_digest_follows_every_source(tmp_path: Path) -> None:
    one, two = make_module(tmp_path / "one.py", "a = 1"), make_module(tmp_path / "two.py", "b = 1")
    before = digest(one, two)
    assert digest(one, two) == before
    make_module(tmp_path / "two.py", "b = 2")
    assert digest(one, two) != before
    assert 0 <= before < 2**63
