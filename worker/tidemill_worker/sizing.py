"""How much of everything a worker has: blocks, sequences, tokens in a step.

Pure arithmetic, done by the worker at its start and by `tidemill plan` before there is a worker. What a
setting leaves open is chosen here, with the reason, which both of them tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidemill.errors import ConfigurationError
from tidemill_scheduler.config import SchedulerConfig
from tidemill_scheduler.costs import PreemptionMode
from tidemill_worker.settings import WorkerSettings

if TYPE_CHECKING:
    from tidemill_worker.model.kv_cache import KVCacheSpec

GIB = 1 << 30
MEAN_LENGTH = 256
"""Tokens of an ordinary sequence, prompt and output: 288 in the jobs of `benchmarks/offline.py`.

Rather too few than too many: that the KV cache is not overrun is the scheduler's care, who admits
what has room; with too many, short sequences would leave room unused.
"""
GIVEN = "as it was set"

Value = TypeVar("Value", int, float)


@dataclass(frozen=True)
class Choice(Generic[Value]):
    """A value for a setting, and why it is this one: half a sentence."""

    value: Value
    reason: str


@dataclass(frozen=True)
class Defaults:
    """What a kind of device gets where the settings leave it open.

    Attributes:
        name: of the device, for the reasons.
        kv_cache_memory: in GiB; `None`: what gpu_memory_utilization leaves.
        max_num_seqs: at most.
        max_num_batched_tokens: as it is.
        swap_space: Choice in GiB.
    """

    name: str
    kv_cache_memory: float | None
    max_num_seqs: int
    max_num_batched_tokens: int
    swap_space: Choice[float]


ON_CPU = Defaults(
    name="CPU",
    kv_cache_memory=1.0,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    swap_space=Choice(
        0.0, "on CPU the KV cache lies in the same memory: a larger one (kv_cache_memory) needs no copies"
    ),
)
"""Those that all figures of the benchmarks on CPU were measured with (`benchmarks/workload.py`). More
sequences gain little there: each has its own KV cache to be read, and the products are busy."""
ON_GPU = Defaults(
    name="a GPU",
    kv_cache_memory=None,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    swap_space=Choice(4.0, "the default on a GPU, which copies KV blocks sooner than it computes them again"),
)
"""vLLM's, which fill a GPU better the larger the products are; a step's activations bound them."""


def defaults_of(device: str) -> Defaults:
    """Those of a kind of device: `cpu` or `cuda`."""
    return ON_GPU if device == "cuda" else ON_CPU


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The sizes of one worker.

    Attributes:
        spec: of a block of the KV cache.
        num_blocks: of the KV cache.
        num_swap_blocks: of the swap space.
        max_model_len: tokens of a sequence, prompt and output, that the model or the settings allow.
        mean_length: tokens of an ordinary sequence, prompt and output.
        max_num_seqs: see the setting.
        max_num_batched_tokens: see the setting.
        swap_space: see the setting; in GiB.
    """

    spec: KVCacheSpec
    num_blocks: int
    num_swap_blocks: int
    max_model_len: int
    mean_length: int
    max_num_seqs: Choice[int]
    max_num_batched_tokens: Choice[int]
    swap_space: Choice[float]

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache has room for."""
        return self.num_blocks * self.spec.block_size

    @property
    def swap_tokens(self) -> int:
        """Tokens that the swap space has room for."""
        return self.num_swap_blocks * self.spec.block_size

    @property
    def choices(self) -> dict[str, Choice[Any]]:
        """What was chosen or given, by the setting."""
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "swap_space": self.swap_space,
        }

    @property
    def longest_sequence(self) -> Choice[int]:
        """Tokens, prompt and output, of the longest sequence that is served."""
        if self.max_model_len <= self.kv_tokens + 1:
            return Choice(self.max_model_len, "the KV cache has room for it")
        reason = f"the KV cache has no room for the {self.max_model_len} tokens that the model could take"
        return Choice(self.kv_tokens + 1, reason)

    def num_sequences(self, length: int) -> int:
        """Sequences of `length` tokens, prompt and output, that the KV cache has room for at a time."""
        return sequences_in(self.num_blocks, length, block_size=self.spec.block_size)


def sequences_in(num_blocks: int, length: int, *, block_size: int) -> int:
    """How many sequences of `length` tokens have room in the blocks; the last token is never in the cache."""
    return num_blocks // max(1, math.ceil((length - 1) / block_size))


def kv_cache_memory(settings: WorkerSettings, defaults: Defaults) -> int | None:
    """Bytes for the KV cache; `None` if it gets what gpu_memory_utilization leaves."""
    memory = settings.kv_cache_memory or defaults.kv_cache_memory
    return None if memory is None else int(memory * GIB)


def size(
    settings: WorkerSettings,
    spec: KVCacheSpec,
    *,
    context: int,
    kv_cache_memory: int,
    defaults: Defaults,
    mean_length: int = MEAN_LENGTH,
) -> Sizing:
    """Decide over all sizes.

    Args:
        settings: whatever they give is kept.
        spec: of a block.
        context: tokens of the longest sequence that the model is made for.
        kv_cache_memory: bytes.
        defaults: of the kind of device.
        mean_length: tokens of an ordinary sequence, prompt and output; at most the longest are meant.

    Raises:
        ConfigurationError: naming the setting that does not go with the model or the memory.
    """
    max_model_len = _max_model_len(settings, context)
    num_blocks = spec.num_blocks_in(kv_cache_memory)
    if num_blocks < 1:
        raise _no_block("kv_cache_memory", spec, kv_cache_memory)
    length = min(mean_length, max_model_len)
    fitting = sequences_in(num_blocks, length, block_size=spec.block_size)
    prompt = 0 if settings.enable_chunked_prefill else max_model_len  # beside the decodes, in one piece
    max_num_seqs = _max_num_seqs(settings, defaults, fitting=fitting, length=length, prompt=prompt)
    swap_space = _swap_space(settings, defaults)
    return Sizing(
        spec=spec,
        num_blocks=num_blocks,
        num_swap_blocks=_num_swap_blocks(spec, int(swap_space.value * GIB)),
        max_model_len=max_model_len,
        mean_length=length,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_max_num_batched_tokens(
            settings, defaults, max_num_seqs=max_num_seqs.value, prompt=prompt
        ),
        swap_space=swap_space,
    )


def scheduler_config(settings: WorkerSettings, sizing: Sizing) -> SchedulerConfig:
    """The scheduler's limits.

    Raises:
        ConfigurationError: naming the setting that does not go with the others or with the model.
    """
    try:
        return SchedulerConfig(
            num_blocks=sizing.num_blocks,
            num_swap_blocks=sizing.num_swap_blocks,
            preemption_mode=settings.preemption_mode,
            max_model_len=sizing.max_model_len,
            block_size=settings.block_size,
            max_num_seqs=sizing.max_num_seqs.value,
            max_num_batched_tokens=sizing.max_num_batched_tokens.value,
            enable_prefix_caching=settings.enable_prefix_caching,
            enable_chunked_prefill=settings.enable_chunked_prefill,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _max_model_len(settings: WorkerSettings, context: int) -> int:
    if settings.max_model_len is not None and settings.max_model_len > context:
        raise ConfigurationError(
            f"max_model_len={settings.max_model_len}: the model's context is {context} tokens"
        )
    return settings.max_model_len or context


def _max_num_seqs(
    settings: WorkerSettings, defaults: Defaults, *, fitting: int, length: int, prompt: int
) -> Choice[int]:
    if settings.max_num_seqs is not None:
        return Choice(settings.max_num_seqs, GIVEN)
    bounds = [
        Choice(max(1, fitting), f"the KV cache has room for {fitting} sequences of {length} tokens"),
        Choice(
            defaults.max_num_seqs,
            f"the most on {defaults.name}; the KV cache has room for {fitting} sequences of {length} tokens",
        ),
    ]
    if settings.max_num_batched_tokens is not None:
        room = max(1, settings.max_num_batched_tokens - prompt)
        bounds.append(Choice(room, "max_num_batched_tokens has a token for no more"))
    return min(bounds, key=lambda bound: bound.value)


def _max_num_batched_tokens(
    settings: WorkerSettings, defaults: Defaults, *, max_num_seqs: int, prompt: int
) -> Choice[int]:
    if settings.max_num_batched_tokens is not None:
        return Choice(settings.max_num_batched_tokens, GIVEN)
    needs = "each of max_num_seqs sequences needs its token"
    if prompt:
        needs += f", and beside them, without chunked prefill, a prompt of up to {prompt} its own"
    bounds = [
        Choice(defaults.max_num_batched_tokens, f"the default on {defaults.name}"),
        Choice(max_num_seqs + prompt, needs),
    ]
    return max(bounds, key=lambda bound: bound.value)


def _swap_space(settings: WorkerSettings, defaults: Defaults) -> Choice[float]:
    mode, choice = settings.preemption_mode, defaults.swap_space
    if settings.swap_space is not None:
        choice = Choice(settings.swap_space, GIVEN)
    elif mode is PreemptionMode.RECOMPUTE:
        choice = Choice(0.0, "preemption_mode=recompute has no use for it")
    if mode is PreemptionMode.SWAP and not choice.value:
        raise ConfigurationError("preemption_mode=swap: there is no swap space; set swap_space, in GiB")
    if mode is PreemptionMode.RECOMPUTE and choice.value:
        raise ConfigurationError(
            f"swap_space={choice.value:g}: preemption_mode=recompute has no use for it; leave one of them out"
        )
    return choice


def _num_swap_blocks(spec: KVCacheSpec, memory: int) -> int:
    num_blocks = spec.num_blocks_in(memory)
    if memory and not num_blocks:
        raise _no_block("swap_space", spec, memory)
    return num_blocks


def _no_block(setting: str, spec: KVCacheSpec, memory: int) -> ConfigurationError:
    block = f"one block of {spec.block_size} tokens ({spec.bytes_per_block / 2**20:.3g} MiB)"
    hint = "; give it more, or on a GPU raise gpu_memory_utilization" if setting == "kv_cache_memory" else ""
    return ConfigurationError(f"{setting}: not even {block} fits in {memory / 2**20:.3g} MiB{hint}")
