"""A device that only notes what is launched, and does it later in any order that its streams allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COMPUTE, SIDE = "compute", "side"
WRITES = (torch.ops.aten.copy_.default, torch.ops.aten.index_select.out, torch.ops.aten.fill_.Scalar)


class DeferredDevice(TorchDispatchMode):
    """While it is entered, writes to tensors are launched on streams: it is a `Streams` itself.

    Views, and tensors made from lists, are there at once, as those of the CPU are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._current = COMPUTE
        self._queues: dict[str, list[tuple[Callable[[], object], int]]] = {COMPUTE: [], SIDE: []}
        self._awaited = {COMPUTE: 0, SIDE: 0}
        """Of each stream: how many of the other's launches those that it is given now come after."""

    @contextmanager
    def side(self) -> Iterator[None]:
        self._current = SIDE
        yield
        self._current = COMPUTE

    def side_awaits_compute(self) -> None:
        self._awaited[SIDE] = len(self._queues[COMPUTE])

    def compute_awaits_side(self) -> None:
        self._awaited[COMPUTE] = len(self._queues[SIDE])

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if function not in WRITES:
            return function(*args, **keywords)
        launch = (lambda: function(*args, **keywords)), self._awaited[self._current]
        self._queues[self._current].append(launch)
        return keywords.get("out", args[0])

    def work(self, prefer: Callable[[], str]) -> list[str]:
        """Do all that was launched; where both streams could go on, `prefer` says which does.

        Returns the stream of each launch, in the order in which they were done.
        """
        done, order = {COMPUTE: 0, SIDE: 0}, []
        while ready := [stream for stream in done if self._is_ready(stream, done)]:
            stream = ready[0] if len(ready) == 1 else prefer()
            run, _ = self._queues[stream][done[stream]]
            run()
            done[stream] += 1
            order.append(stream)
        assert len(order) == sum(map(len, self._queues.values())), "the streams wait for each other"
        return order

    def _is_ready(self, stream: str, done: dict[str, int]) -> bool:
        queue, other = self._queues[stream], SIDE if stream == COMPUTE else COMPUTE
        return done[stream] < len(queue) and queue[done[stream]][1] <= done[other]
