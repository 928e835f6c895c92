"""Swaps on a GPU's streams: nothing is seen too early or too late, however the streams run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.model.streams import COMPUTE, SIDE, DeferredDevice
from tidemill_worker.model.lap import HostLap
from tidemill_worker.model.restore_speeds import RestoreSpeeds
from tidemill_worker.model.swapper import DirectSwapper, StagedSwapper, Swapper

NUM_BLOCKS, NUM_SWAP_BLOCKS, STAGED = 5, 4, 2
Pairs = list[tuple[int, int]]


@dataclass
class Step:
    """What a plan does to the blocks; its rows read all of the KV cache and write some of it."""

    swap_out: Pairs = field(default_factory=list)
    swap_in: Pairs = field(default_factory=list)
    written: list[int] = field(default_factory=list)


def pairs(sources: int, targets: int) -> st.SearchStrategy[Pairs]:
    """Some of the targets, in any order, each from any source."""
    pair = st.tuples(st.integers(0, sources - 1), st.integers(0, targets - 1))
    return st.lists(pair, unique_by=lambda pair: pair[1])


STEPS = st.lists(
    st.builds(
        Step,
        swap_out=pairs(NUM_BLOCKS, NUM_SWAP_BLOCKS),
        swap_in=pairs(NUM_SWAP_BLOCKS, NUM_BLOCKS),
        written=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True),
    ),
    min_size=1,
    max_size=4,
)


class Memory:
    """A KV cache and a swap space of one number a block, and what the rows of each step have read."""

    def __init__(self) -> None:
        self.kv_cache = torch.arange(float(NUM_BLOCKS)).unsqueeze(1)
        self.swap_space = -1 - torch.arange(float(NUM_SWAP_BLOCKS)).unsqueeze(1)
        self.staging = torch.full((STAGED, 1), torch.nan)
        self.seen: list[torch.Tensor] = []

    def execute(self, steps: list[Step], swapper: Swapper) -> None:
        for number, step in enumerate(steps, start=1):
            swapper.swap_out(step.swap_out)
            swapper.swap_in(step.swap_in)
            self.seen.append(torch.empty(self.kv_cache.shape).copy_(self.kv_cache))
            for block in step.written:
                self.kv_cache[block].fill_(100 * number + block)

    def contents(self) -> list[list[float]]:
        return [tensor.flatten().tolist() for tensor in (*self.seen, self.kv_cache, self.swap_space)]


def in_order(steps: list[Step]) -> list[list[float]]:
    """What memory holds when each copy is over before anything else begins."""
    memory = Memory()
    memory.execute(steps, DirectSwapper(memory.kv_cache, memory.swap_space, RestoreSpeeds(HostLap)))
    return memory.contents()


def on_streams(steps: list[Step], device: DeferredDevice, prefer: Callable[[], str]) -> list[list[float]]:
    """The same when all is launched first, and the streams then run as `prefer` likes."""
    memory, speeds = Memory(), RestoreSpeeds(HostLap)
    with device:
        memory.execute(
            steps, StagedSwapper(memory.kv_cache, memory.swap_space, memory.staging, device, speeds)
        )
    device.work(prefer)
    return memory.contents()


@given(steps=STEPS, data=st.data())
def test_swaps_are_those_of_one_stream(steps: list[Step], data: st.DataObject) -> None:
    found = on_streams(steps, DeferredDevice(), lambda: data.draw(st.sampled_from([COMPUTE, SIDE])))
    assert found == in_order(steps)


# Given more blocks than the staging buffer holds, each given away in the step in which it leaves, and back
# in the next, in the place of what was read and written meanwhile.
CROWDED = [
    Step(swap_out=[(0, 3), (1, 0), (2, 1), (3, 2)], swap_in=[(3, 0), (0, 4)], written=[1, 2, 3]),
    Step(swap_out=[(1, 3), (4, 1)], swap_in=[(2, 1), (1, 2), (3, 3)], written=[0, 4]),
]


@pytest.mark.parametrize("prefer", [COMPUTE, SIDE])
def test_one_stream_may_run_far_ahead_of_the_other(prefer: str) -> None:
    assert on_streams(CROWDED, DeferredDevice(), lambda: prefer) == in_order(CROWDED)


@pytest.mark.parametrize(
    ("wait", "prefer"), [("side_awaits_compute", SIDE), ("compute_awaits_side", COMPUTE)]
)
def test_a_wait_that_is_left_out_is_noticed(wait: str, prefer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredDevice, wait, lambda device: None)
    assert on_streams(CROWDED, DeferredDevice(), lambda: prefer) != in_order(CROWDED)


def test_the_way_to_the_cpu_goes_on_beside_the_step() -> None:
    """Given blocks that go out and nothing that comes in, then the step may end before they have left."""
    memory, device = Memory(), DeferredDevice()
    with device:
        speeds = RestoreSpeeds(HostLap)
        swapper = StagedSwapper(memory.kv_cache, memory.swap_space, memory.staging, device, speeds)
        memory.execute([Step(swap_out=[(0, 3), (4, 1)], written=[0, 4])], swapper)
    assert device.work(lambda: COMPUTE) == [*[COMPUTE] * 4, *[SIDE] * 2]
