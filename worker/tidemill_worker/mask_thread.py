"""The thread in which masks are computed while the engine's own thread waits for the model."""

from __future__ import annotations

import time
from queue import SimpleQueue
from threading import Event, Lock, Thread, current_thread
from typing import Protocol

PATIENCE = 20.0
"""Seconds for one mask. The library's own limits end it within tenths of a second."""


class Masked(Protocol):
    """A grammar whose next mask is wanted."""

    def compute(self) -> None: ...

    def fail(self, reason: str) -> None: ...


class MaskThread:
    """Computes one mask after another, in the order in which they are asked for."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._wanted: SimpleQueue[Masked | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._computing: tuple[Masked, float] | None = None

    def submit(self, grammar: Masked) -> None:
        """Have the grammar's mask computed."""
        self._wanted.put(grammar)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._start()

    def wait(self, ready: Event) -> None:
        """Return when `ready` is set.

        A mask that takes longer than anything should makes its grammar fail and is left alone, and
        the others go on in another thread: native code cannot be interrupted.
        """
        while not ready.wait(self._patience):
            with self._lock:
                if self._computing is None or time.monotonic() - self._computing[1] < self._patience:
                    continue
                stuck, _ = self._computing
                self._computing = None
                self._start()
            stuck.fail(f"what may come next was not known after {self._patience:g} s")

    def close(self) -> None:
        """Let the thread end once it has done what it was asked to."""
        self._wanted.put(None)

    def _start(self) -> None:
        self._thread = Thread(target=self._run, name="masks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._thread is current_thread():
            grammar = self._wanted.get()
            if grammar is None:
                return
            self._computing = (grammar, time.monotonic())
            try:
                grammar.compute()
            except BaseException as error:  # a panic of the library is no Exception
                grammar.fail(f"what may come next could not be computed: {error!r}")
            if self._thread is current_thread():
                self._computing = None
            del grammar  # else it would live on until the next one comes
