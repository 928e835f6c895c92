"""Where the model runs, in which type, and how much of a GPU's memory its KV cache gets.

What torch sees of the machine comes in as values, so that every decision can be made anywhere.
"""

from __future__ import annotations

import torch

from tidemill.errors import ConfigurationError

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The types that models run in, by the names of the setting `dtype`."""


def gpu_obstacle() -> str | None:
    """Why torch cannot compute on a GPU here; `None` if it can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return "torch sees no GPU; is there a driver, and may this process use it?"


def choose_device(device: str, dtype: str, *, obstacle: str | None) -> torch.device:
    """Decide for the CPU or the first CUDA device.

    Args:
        device: `cpu`, `cuda`, or `auto` for CUDA where nothing is in its way.
        dtype: the type asked for, a key of `FLOATS` or `auto`.
        obstacle: what `gpu_obstacle` says.

    Raises:
        ConfigurationError: CUDA is asked for where it cannot be had, or a half type on CPU.
    """
    if device == "cuda" and obstacle is not None:
        raise ConfigurationError(f"device=cuda: {obstacle}")
    if device != "cpu" and obstacle is None:
        return torch.device("cuda", 0)
    if dtype not in ("auto", "float32"):
        raise ConfigurationError(f"dtype={dtype}: on CPU the model runs in float32")
    return torch.device("cpu")


def choose_dtype(dtype: str, device: torch.device, *, stored: torch.dtype | None) -> torch.dtype:
    """Decide for a type: the one asked for, else float32 on CPU, else the one the model is stored in."""
    if dtype != "auto":
        return FLOATS[dtype]
    if device.type == "cuda" and stored is not None and stored in FLOATS.values():
        return stored
    return torch.float32


def kv_cache_share(*, utilization: float, total: int, free: int, weights: int) -> int:
    """Bytes for the KV cache on a GPU, so that it and the weights take their share of the memory.

    What remains of it is for the activations of a step, and for whoever else uses the GPU.

    Args:
        utilization: the share, above 0 and at most 1.
        total: bytes that the GPU has.
        free: bytes that nobody has taken, now that the weights are loaded.
        weights: bytes that the model takes.

    Raises:
        ConfigurationError: the weights alone take the share, or so much is not free.
    """
    share = int(utilization * total)
    if weights >= share:
        raise ConfigurationError(
            f"gpu_memory_utilization={utilization:g}: that is {_gib(share)} of {_gib(total)}, and the"
            f" model's weights alone take {_gib(weights)}"
        )
    if share - weights > free:
        raise ConfigurationError(
            f"gpu_memory_utilization={utilization:g}: that leaves {_gib(share - weights)} for the KV"
            f" cache, but only {_gib(free)} of {_gib(total)} are free; is the GPU in use?"
        )
    return share - weights


def gpu_kv_cache_memory(device: torch.device, utilization: float) -> int:
    """`kv_cache_share` of this GPU, onto which the model has just been loaded."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    return kv_cache_share(utilization=utilization, total=total, free=free, weights=weights)


def check_room(weights: int, device: torch.device) -> None:
    """Refuse weights, of so many bytes, for which a GPU has no room.

    Raises:
        ConfigurationError: with both sizes.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        check_weights_fit(weights=weights, free=free, total=total)


def check_weights_fit(*, weights: int, free: int, total: int) -> None:
    """`check_room` of a GPU with so many bytes, of which so many are free."""
    if weights > free:
        raise ConfigurationError(
            f"model: its weights take {_gib(weights)}, but only {_gib(free)} of {_gib(total)} are free on"
            " the GPU"
        )


def place(device: torch.device) -> str:
    """Where memory is taken, and how much of it there is left on a GPU, for people."""
    if device.type != "cuda":
        return str(device)
    free, total = torch.cuda.mem_get_info(device)
    return f"{device}, where {_gib(free)} of {_gib(total)} are free"


def gpu_description() -> str:
    """The first GPU's name and memory, for people."""
    return f"{torch.cuda.get_device_name(0)}, {_gib(torch.cuda.mem_get_info(0)[1])}"


def machine_facts(device: torch.device) -> tuple[str, ...]:
    """What of this machine decides over the bits of a product."""
    if device.type == "cuda":
        return (torch.cuda.get_device_name(device), str(torch.version.cuda))
    return (torch.backends.cpu.get_cpu_capability(),)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
