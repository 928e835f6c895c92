"""Compiled code runs on as many of torch's threads as torch itself would use."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from tidemill_kernels.openmp import run_on_threads


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_once_on_each_thread(threads: int) -> None:
    calls: list[tuple[int, int | None]] = []
    # The last thread to come lets the others go: each call has a thread of its own.
    together = threading.Barrier(threads)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def record(argument: int | None) -> None:
        calls.append((threading.get_ident(), argument))
        together.wait(timeout=10)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run_on_threads(ctypes.cast(record, ctypes.c_void_p).value or 0, 1234)
    finally:
        torch.set_num_threads(before)
    assert len({thread for thread, _ in calls}) == threads
    assert [argument for _, argument in calls] == [1234] * threads
