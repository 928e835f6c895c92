"""Compiled code on disk is renewed when any source it was made of has changed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from numba import types
from numba.core import caching

from tidemill_kernels.jit import compile_native, compiled, digest


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


def test_without_a_folder_to_write_it_compiles_in_each_process() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    with patch.object(caching.CacheImpl, "_locator_classes", []):
        assert compiled(add)(2, 3) == 5
        native = compile_native(types.int64(types.int64, types.int64), add)
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(native.address)(2, 3) == 5
