"""How long a step takes on a GPU, from what it must read, multiply and copy.

The roofline of Williams, Waterman and Patterson (2009): a kernel is as fast as the slower of memory
and arithmetic allows. No kernel reaches the figures of a data sheet, so each is taken at a share.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_shape import ELEMENT_BYTES, ModelShape

from tidemill_scheduler import RestoreCosts, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A GPU as its data sheet describes it."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes per second between it and its memory."""
    rate: float
    """Operations per second in bfloat16, dense: half of what is claimed with sparsity."""
    link: float
    """Bytes per second to or from CPU memory: half of what is claimed for both directions."""


ACCELERATORS = {
    # NVIDIA A100 Tensor Core GPU data sheet (2021), A100 80GB SXM: PCIe Gen4, 64 GB/s both ways.
    "a100": Accelerator(name="A100 80GB SXM", memory=80e9, bandwidth=2.039e12, rate=312e12, link=32e9),
    # NVIDIA H100 Tensor Core GPU data sheet (2023), H100 SXM: PCIe Gen5, 128 GB/s both ways.
    "h100": Accelerator(name="H100 SXM", memory=80e9, bandwidth=3.35e12, rate=989.5e12, link=64e9),
    # NVIDIA H200 Tensor Core GPU data sheet (2024), H200 SXM: PCIe Gen5, 128 GB/s both ways.
    "h200": Accelerator(name="H200 SXM", memory=141e9, bandwidth=4.8e12, rate=989.5e12, link=64e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What an engine gets out of a GPU. These are assumptions, made to be changed, not measurements."""

    bandwidth: float = 0.8
    """Share of the memory's bandwidth that a step of decodes reaches."""
    rate: float = 0.6
    """Share of the operations per second that a step of prefills reaches."""
    link: float = 0.8
    """Share of the link that copies of whole blocks from pinned memory reach."""
    step_overhead: float = 1e-3
    """Seconds of each step in which the GPU waits: scheduling, launches, sampling."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "rate", "link"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} efficiency is {getattr(self, name)}, must be above 0, at most 1")
        if self.step_overhead < 0.0:
            raise ValueError(f"step_overhead is {self.step_overhead}, must be at least 0 seconds")


@dataclass(frozen=True, slots=True)
class StepWork:
    """What of a plan costs time."""

    num_tokens: int = 0
    num_sampled: int = 0
    """Rows whose logits are wanted."""
    num_read: int = 0
    """Positions whose keys and values are read, each row's whole context once."""
    num_pairs: int = 0
    """Pairs of a query and a key that it may attend to."""
    num_swapped: int = 0
    """Blocks copied over the link, in either direction."""
    num_copied: int = 0
    """Blocks copied on the device."""


def work_of(plan: StepPlan) -> StepWork:
    """Add up the rows and copies of a plan."""
    num_tokens = num_sampled = num_read = num_pairs = 0
    for row in plan.rows:
        count, end = row.count, row.start + row.count
        num_tokens += count
        num_sampled += row.sample
        num_read += end
        num_pairs += count * end - count * (count - 1) // 2
    num_swapped = len(plan.swap_out) + len(plan.swap_in)
    return StepWork(num_tokens, num_sampled, num_read, num_pairs, num_swapped, len(plan.block_copies))


@dataclass(frozen=True, slots=True)
class Roofline:
    """The cost model: a model on a GPU, its KV in blocks of `block_size` tokens."""

    model: ModelShape
    accelerator: Accelerator
    efficiency: Efficiency
    block_size: int = 16

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.model.kv_bytes_per_token

    def step_seconds(self, work: StepWork) -> float:
        """One step: copies first, then the forward pass, if there are rows.

        On a GPU, what a worker swaps out leaves beside the pass; taken one after the other here, it costs
        more than it would.
        """
        forward = self._forward_seconds(work) if work.num_tokens else 0.0
        return self.efficiency.step_overhead + self._copying_seconds(work) + forward

    def _forward_seconds(self, work: StepWork) -> float:
        return max(self._reading_seconds(work), self._computing_seconds(work))

    def _reading_seconds(self, work: StepWork) -> float:
        model = self.model
        head = model.head_parameters if work.num_sampled else 0
        weights = ELEMENT_BYTES * (model.touched_parameters(work.num_tokens) + head)
        kv = model.kv_bytes_per_token * (work.num_read + work.num_tokens)
        return (weights + kv) / (self.accelerator.bandwidth * self.efficiency.bandwidth)

    def _computing_seconds(self, work: StepWork) -> float:
        model = self.model
        products = model.active_parameters * work.num_tokens + model.head_parameters * work.num_sampled
        # A pair costs a product of the query with the key, and one of its weight with the value.
        attention = 2 * model.num_layers * model.num_heads * model.head_dim * work.num_pairs
        return 2 * (products + attention) / (self.accelerator.rate * self.efficiency.rate)

    def _copying_seconds(self, work: StepWork) -> float:
        over_link = work.num_swapped / (self.accelerator.link * self.efficiency.link)
        on_device = 2 * work.num_copied / (self.accelerator.bandwidth * self.efficiency.bandwidth)
        return self.block_bytes * (over_link + on_device)

    def restore_costs(self, chunk: int) -> RestoreCosts:
        """What a runner on this GPU would measure: the pass of `chunk` tokens of a prompt, and a copy."""
        prefill = StepWork(chunk, 0, chunk, chunk * (chunk + 1) // 2)
        return RestoreCosts(
            seconds_per_token=self._forward_seconds(prefill) / chunk,
            seconds_per_block=self._copying_seconds(StepWork(num_swapped=1)),
        )

    def blocks_in(self, gpu_memory_utilization: float) -> int:
        """Blocks that fit beside the weights into a share of the GPU's memory.

        Raises:
            ValueError: if the share is none, or the weights leave no room for a block.
        """
        if not 0.0 < gpu_memory_utilization <= 1.0:
            raise ValueError(
                f"gpu_memory_utilization is {gpu_memory_utilization}, must be above 0, at most 1"
            )
        room = self.accelerator.memory * gpu_memory_utilization
        weights = ELEMENT_BYTES * self.model.num_parameters
        if (num_blocks := int((room - weights) // self.block_bytes)) < 1:
            raise ValueError(
                f"the weights take {weights / 1e9:.1f} GB, which leaves no block of the"
                f" {room / 1e9:.1f} GB that gpu_memory_utilization {gpu_memory_utilization} allows"
            )
        return num_blocks
