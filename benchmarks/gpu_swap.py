"""Swaps on the GPU at hand, beside a busy compute stream: what comes back is what left.

    python benchmarks/gpu_swap.py [--rounds N] [--json PATH]

The same rounds are run twice, from the same random numbers: once with the device idle before and after
each call, once with all of it launched at full speed. In a round, blocks are written behind a long
product, swapped out, overwritten at once, and swapped in elsewhere. Any byte that comes back other than
it was written, or differs between the two runs, ends the program with exit code 1.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from measure import report
from torch import Tensor

from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.model.lap import laps_of
from tidemill_worker.model.restore_speeds import RestoreSpeeds
from tidemill_worker.model.swapper import make_swapper

# 2 MiB a block, as of an 8B model with grouped heads; one round's swap overflows the staging buffer.
SPEC = KVCacheSpec(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.float16)
NUM_BLOCKS, NUM_SWAP_BLOCKS, SWAPPED = 128, 96, 48
PRODUCTS, SIZE = 32, 4096
"""Of square matrices, between two calls: 4.4e12 operations, some milliseconds on the fastest GPU, in
which a copy that did not wait would be over long before the blocks are written."""


@dataclass(frozen=True)
class Outcome:
    """Checksums: of the blocks that each round wrote and got back, and of all memory in the end."""

    written: list[str]
    arrived: list[str]
    memory: list[str]


class Rounds:
    """Random rounds over one KV cache and its swap space; equal seeds are equal rounds."""

    def __init__(
        self, spec: KVCacheSpec, device: torch.device, *, num_blocks: int, num_swap_blocks: int
    ) -> None:
        self.kv_cache = spec.allocate(num_blocks, device)
        self.swap_space = spec.allocate_swap_space(num_swap_blocks, device)
        self.speeds = RestoreSpeeds(laps_of(device))
        self._swapper = make_swapper(self.kv_cache, self.swap_space, self.speeds)

    def run(self, rounds: int, swapped: int, between: Callable[[], object]) -> Outcome:
        """Swap `swapped` blocks in each round; `between` is called between any two pieces of work."""
        torch.manual_seed(0)
        dice = random.Random(0)
        pairs = [self._round(dice, swapped, between) for _ in range(rounds)]
        return Outcome(
            written=checksums(written for written, _ in pairs),
            arrived=checksums(arrived for _, arrived in pairs),
            memory=checksums((self.kv_cache, self.swap_space)),
        )

    def _round(
        self, dice: random.Random, swapped: int, between: Callable[[], object]
    ) -> tuple[Tensor, Tensor]:
        """Blocks as they were written, and as they arrived elsewhere."""
        blocks = dice.sample(range(len(self.kv_cache)), 2 * swapped)
        slots = dice.sample(range(len(self.swap_space)), swapped)
        leaving, coming = blocks[:swapped], blocks[swapped:]
        given_away, filled = self._indices(leaving), self._indices(coming)
        written = torch.randn_like(self.kv_cache[:swapped])
        between()
        self.kv_cache.index_copy_(0, given_away, written)
        between()
        self._swapper.swap_out(list(zip(leaving, slots, strict=True)))
        self.kv_cache.index_fill_(0, given_away, torch.nan)
        between()
        self._swapper.swap_in(list(zip(slots, coming, strict=True)))
        return written, self.kv_cache.index_select(0, filled)

    def _indices(self, blocks: list[int]) -> Tensor:
        """On the device, without waiting for it."""
        return torch.tensor(blocks).to(self.kv_cache.device, non_blocking=True)


def checksums(tensors: Iterable[Tensor]) -> list[str]:
    return [blake2b(tensor.cpu().view(torch.uint8).numpy().tobytes()).hexdigest() for tensor in tensors]


def fault(idle: Outcome, busy: Outcome) -> str | None:
    """What is wrong, by the same rounds on an idle and on a busy device; `None` if nothing is."""
    if idle.arrived != idle.written:
        return "swapped blocks came back other than they were written, though the device was idle"
    if busy != idle:
        return "swapped blocks differ from those that were swapped with the device idle"
    return None


def make_rounds(device: torch.device) -> Rounds:
    return Rounds(SPEC, device, num_blocks=NUM_BLOCKS, num_swap_blocks=NUM_SWAP_BLOCKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this check needs a CUDA device and a CUDA build of torch")
    device = torch.device("cuda")
    busy = torch.randn(SIZE, SIZE, dtype=torch.float16, device=device)

    def load() -> None:
        for _ in range(PRODUCTS):
            torch.mm(busy, busy)

    idle = make_rounds(device).run(arguments.rounds, SWAPPED, torch.cuda.synchronize)
    loaded = make_rounds(device)
    if message := fault(idle, loaded.run(arguments.rounds, SWAPPED, load)):
        sys.exit(message)
    figures = {"swap_gb_per_s": SPEC.bytes_per_block / loaded.speeds.costs.seconds_per_block / 1e9}
    settings = {"gpu": torch.cuda.get_device_name(), "rounds": arguments.rounds}
    report(figures, settings=settings, path=arguments.json)


if __name__ == "__main__":
    main()
