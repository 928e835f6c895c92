"""Measures how long a device works at something, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch


class Lap(Protocol):
    """One measurement; it begins when it is made."""

    def stop(self) -> None:
        """What was launched since the beginning is what is measured."""

    @property
    def seconds(self) -> float | None:
        """How long it took; `None` while the device is still at it."""


class HostLap:
    """Of work that is done when its call returns, as it is on CPU."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: float | None = None
        self._start = clock()

    def stop(self) -> None:
        self._seconds = self._clock() - self._start

    @property
    def seconds(self) -> float | None:
        return self._seconds


class CudaLap:
    """Of what the current stream is given meanwhile; the GPU notes the times itself."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def stop(self) -> None:
        self._end.record()

    @property
    def seconds(self) -> float | None:
        return self._start.elapsed_time(self._end) / 1e3 if self._end.query() else None


def laps_of(device: torch.device) -> Callable[[], Lap]:
    """How laps of work on `device` are begun."""
    return CudaLap if device.type == "cuda" else HostLap
