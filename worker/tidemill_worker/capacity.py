"""What a model would have room for on a machine that need not be there: the work of `tidemill plan`.

Reads the model's configuration and no weights. What the worker would refuse is refused in its words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemill.errors import ConfigurationError
from tidemill_worker.model.checkpoint import embedded_gguf, locate_config
from tidemill_worker.model.device import check_weights_fit, choose_device, choose_dtype, kv_cache_share
from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.model.loader import load_config, stored_dtype
from tidemill_worker.model.outline import outline, quantized_weight_bytes
from tidemill_worker.settings import EMBEDDED_MODEL, WorkerSettings
from tidemill_worker.sizing import (
    GIB,
    MEAN_LENGTH,
    Choice,
    Sizing,
    defaults_of,
    kv_cache_memory,
    scheduler_config,
    size,
)

if TYPE_CHECKING:
    import torch

FOR_A_GPU = "give --gpu-memory for a GPU"


@dataclass(frozen=True)
class Capacity:
    """A model on a machine.

    Attributes:
        model: the name that jobs would know it by.
        dtype: of weights and KV cache.
        num_parameters: of the model.
        weight_bytes: what they take.
        gpu_memory: bytes of the GPU; `None` on CPU.
        sizing: the sizes that a worker would have.
    """

    model: str
    dtype: str
    num_parameters: int
    weight_bytes: int
    gpu_memory: int | None
    sizing: Sizing

    @property
    def choices(self) -> dict[str, Choice[Any]]:
        """Settings to start the worker with, and why."""
        return {"max_model_len": self.sizing.longest_sequence, **self.sizing.choices}

    @property
    def figures(self) -> dict[str, object]:
        """All of it, for a program. Memory is in bytes, lengths are in tokens."""
        sizing, longest = self.sizing, self.sizing.longest_sequence.value
        return {
            "model": self.model,
            "dtype": self.dtype,
            "parameters": self.num_parameters,
            "weight_bytes": self.weight_bytes,
            "gpu_memory_bytes": self.gpu_memory,
            "kv_bytes_per_token": sizing.spec.bytes_per_token,
            "kv_bytes_per_block": sizing.spec.bytes_per_block,
            "kv_cache_bytes": sizing.num_blocks * sizing.spec.bytes_per_block,
            "kv_cache_blocks": sizing.num_blocks,
            "kv_cache_tokens": sizing.kv_tokens,
            "swap_blocks": sizing.num_swap_blocks,
            "swap_tokens": sizing.swap_tokens,
            "mean_length": sizing.mean_length,
            "sequences_of_mean_length": sizing.num_sequences(sizing.mean_length),
            "longest_sequence": longest,
            "sequences_of_longest": sizing.num_sequences(longest),
            "settings": {
                name: {"value": choice.value, "reason": choice.reason}
                for name, choice in self.choices.items()
            },
        }


def plan_capacity(settings: WorkerSettings, *, gpu_memory: float | None, mean_length: int | None) -> Capacity:
    """Work out what a worker with these settings would have room for.

    Args:
        settings: as the worker would be given them; `device` does not matter.
        gpu_memory: GiB of the GPU; `None` for a worker on CPU.
        mean_length: tokens of an ordinary sequence, prompt and output; `None` for what a worker assumes.

    Raises:
        ModelUnsupported: there is no such model, or it cannot be served.
        ConfigurationError: the model does not fit, or a setting does not go with it.
    """
    total = _gpu_memory(settings, gpu_memory)
    device = _device(settings, total)
    place = embedded_gguf() if settings.model == EMBEDDED_MODEL else locate_config(settings.model)
    config = load_config(place)
    dtype = choose_dtype(settings.dtype, device, stored=stored_dtype(config))
    model = outline(config, dtype=dtype)
    weights = model.weight_bytes
    if total is not None:
        weights = quantized_weight_bytes(place, config) or weights
    sizing = size(
        settings,
        KVCacheSpec.for_layers(model.layers, block_size=settings.block_size, dtype=dtype),
        context=model.context,
        kv_cache_memory=_kv_cache_memory(settings, total, weights),
        defaults=defaults_of(device.type),
        mean_length=mean_length or MEAN_LENGTH,
    )
    if mean_length is not None and mean_length > sizing.max_model_len:
        raise ConfigurationError(
            f"mean_length={mean_length}: a sequence has at most {sizing.max_model_len} tokens (max_model_len)"
        )
    scheduler_config(settings, sizing)  # refuses what only the scheduler knows to be wrong
    return Capacity(
        model=settings.model_name,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=model.num_parameters,
        weight_bytes=weights,
        gpu_memory=total,
        sizing=sizing,
    )


def _gpu_memory(settings: WorkerSettings, gpu_memory: float | None) -> int | None:
    """Bytes of the GPU; `None` without one."""
    if gpu_memory is None:
        if "gpu_memory_utilization" in settings.model_fields_set:
            share = f"gpu_memory_utilization={settings.gpu_memory_utilization:g}"
            raise ConfigurationError(f"{share}: a worker on CPU has no share of a GPU; {FOR_A_GPU}")
        return None
    if not math.isfinite(gpu_memory * GIB):
        raise ConfigurationError(f"gpu_memory={gpu_memory:g}: give a finite number of GiB")
    return int(gpu_memory * GIB)


def _device(settings: WorkerSettings, total: int | None) -> torch.device:
    try:
        return choose_device("cpu" if total is None else "cuda", settings.dtype, obstacle=None)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; {FOR_A_GPU}") from error


def _kv_cache_memory(settings: WorkerSettings, total: int | None, weights: int) -> int:
    """Bytes for the KV cache, on CPU or beside the weights on a GPU with `total` bytes and no other user."""
    memory = kv_cache_memory(settings, defaults_of("cpu" if total is None else "cuda"))
    if total is None:
        assert memory is not None  # the default on CPU is no share
        return memory
    check_weights_fit(weights=weights, free=total, total=total)
    if memory is None:
        return kv_cache_share(
            utilization=settings.gpu_memory_utilization, total=total, free=total - weights, weights=weights
        )
    if memory > total - weights:
        raise ConfigurationError(
            f"kv_cache_memory={settings.kv_cache_memory:g}: the weights leave {_size(total - weights)} of"
            f" the GPU's {_size(total)}"
        )
    return memory


def report(capacity: Capacity) -> Iterator[str]:
    """Lines for people."""
    sizing, row = capacity.sizing, "{:<31} {}".format
    spec, longest = sizing.spec, sizing.longest_sequence.value
    yield row("model", f"{capacity.model}, {capacity.num_parameters:,} parameters, {capacity.dtype}")
    yield row("weights", _size(capacity.weight_bytes))
    if capacity.gpu_memory is None:
        yield row("device", f"CPU ({FOR_A_GPU})")
    else:
        yield row("GPU memory", _size(capacity.gpu_memory))
    yield row("KV cache", _size(sizing.num_blocks * spec.bytes_per_block))
    yield row("  a token takes", _size(spec.bytes_per_token))
    yield row("  room for", _room(sizing.kv_tokens, sizing.num_blocks, spec.block_size))
    for length in dict.fromkeys((sizing.mean_length, longest)):
        count = sizing.num_sequences(length)
        yield row("", f"{count:,} sequence{'' if count == 1 else 's'} of {length:,} tokens")
    if sizing.num_swap_blocks:
        yield row("swap space", _size(sizing.num_swap_blocks * spec.bytes_per_block))
        yield row("  room for", _room(sizing.swap_tokens, sizing.num_swap_blocks, spec.block_size))
    yield ""
    for name, choice in capacity.choices.items():
        yield row(f"--{name.replace('_', '-')} {choice.value:.15g}", choice.reason)


def _room(tokens: int, blocks: int, block_size: int) -> str:
    return f"{tokens:,} tokens, in {blocks:,} blocks of {block_size}"


def _size(memory: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if memory >= unit:
            return f"{memory / unit:.4g} {name}"
    return f"{memory} bytes"
