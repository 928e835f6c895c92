"""Moves blocks between the KV cache and the swap space, in order with the compute that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tidemill_worker.model.kv_cache import copy_blocks
from tidemill_worker.model.restore_speeds import RestoreSpeeds

STAGING_BYTES = 64 * 2**20
"""Of a GPU's memory, for blocks on their way out: 512 tokens of a model with 128 KiB of KV a token."""


class Swapper(Protocol):
    """Pairs are `(source, target)`, indices of whole blocks; no target is given twice in a call.

    Calls take effect in their order, and each as a whole before the compute launched after it.
    """

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the KV cache to blocks of the swap space."""

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the swap space to blocks of the KV cache."""


class DirectSwapper:
    """For a KV cache in the memory that the swap space is in."""

    def __init__(self, kv_cache: torch.Tensor, swap_space: torch.Tensor, speeds: RestoreSpeeds) -> None:
        self._kv_cache = kv_cache
        self._swap_space = swap_space
        self._speeds = speeds

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self._speeds.copying(len(pairs)):
            copy_blocks(self._swap_space, self._kv_cache, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self._speeds.copying(len(pairs)):
            copy_blocks(self._kv_cache, self._swap_space, pairs)


class Streams(Protocol):
    """Two queues of work for one device. Each is done in its order; between them only waits give order."""

    def side(self) -> AbstractContextManager[object]:
        """What is launched inside goes to the side stream, everything else to the compute stream."""

    def side_awaits_compute(self) -> None:
        """What the side stream is given from now on begins after all that compute was given so far."""

    def compute_awaits_side(self) -> None:
        """What compute is given from now on begins after all that the side stream was given so far."""


class CudaStreams:
    """The stream that is current, and one beside it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def side(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._side)

    def side_awaits_compute(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def compute_awaits_side(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)


class StagedSwapper:
    """For a KV cache in a GPU's memory and a swap space in pinned CPU memory.

    Blocks on their way out are given to someone else in the same step. So the compute stream gathers
    them first, in a staging buffer, and the slow way from there to the CPU goes on beside the step. That
    also rules out the fault of reading a block on one stream while another writes it (vllm#45704): on
    the way out, the KV cache is read on the compute stream only. Swap space is touched on the side
    stream only, so that what goes out has arrived before it comes in again.

    Args:
        kv_cache: `[block, ...]`, on the device.
        swap_space: `[swap block, ...]`, pinned.
        staging: `[staged block, ...]`, at least one, on the device.
        streams: on which the device works.
        speeds: is told how long the copies between device and CPU take.
    """

    def __init__(
        self,
        kv_cache: torch.Tensor,
        swap_space: torch.Tensor,
        staging: torch.Tensor,
        streams: Streams,
        speeds: RestoreSpeeds,
    ) -> None:
        self._kv_cache = kv_cache
        self._swap_space = swap_space
        self._staging = staging
        self._streams = streams
        self._speeds = speeds

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        by_target = sorted(pairs, key=lambda pair: pair[1])  # adjacent ones leave in one piece
        sources = torch.tensor([source for source, _ in by_target])
        sources = sources.to(self._kv_cache.device, non_blocking=True)
        targets = [target for _, target in by_target]
        room = len(self._staging)
        for start in range(0, len(targets), room):
            self._swap_out(sources[start : start + room], targets[start : start + room])

    def _swap_out(self, sources: torch.Tensor, targets: Sequence[int]) -> None:
        """As many as the staging buffer holds; `sources` is int64, on the device."""
        self._streams.compute_awaits_side()  # until the buffer's former contents have left
        torch.index_select(self._kv_cache, 0, sources, out=self._staging.narrow(0, 0, len(targets)))
        self._streams.side_awaits_compute()
        with self._streams.side(), self._speeds.copying(len(targets)):
            copy_blocks(self._swap_space, self._staging, list(enumerate(targets)))

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        self._streams.side_awaits_compute()  # which may still use these blocks' former contents
        with self._streams.side(), self._speeds.copying(len(pairs)):
            copy_blocks(self._kv_cache, self._swap_space, pairs)
        self._streams.compute_awaits_side()


def make_swapper(kv_cache: torch.Tensor, swap_space: torch.Tensor, speeds: RestoreSpeeds) -> Swapper:
    """The swapper for where the KV cache lies."""
    if kv_cache.device.type != "cuda":
        return DirectSwapper(kv_cache, swap_space, speeds)
    room = max(1, min(STAGING_BYTES // kv_cache[0].nbytes, len(swap_space)))
    staging = torch.empty_like(kv_cache[:room])
    return StagedSwapper(kv_cache, swap_space, staging, CudaStreams(kv_cache.device), speeds)
