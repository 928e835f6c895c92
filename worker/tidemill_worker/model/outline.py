"""A model without its weights: what its configuration alone decides about the memory it takes.

The model is built on torch's `meta` device, where tensors have a shape and no content, and surveyed there
as a loaded one is. Its tokens, positions and masks are real, so that whatever the model decides by
them, and whatever the survey asks of its masks, comes out as in a forward with weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tidemill.errors import ConfigurationError
from tidemill_worker.model.architecture import (
    check_config,
    context_length,
    quantization,
    register_architectures,
)
from tidemill_worker.model.attention import IMPLEMENTATION, deliver_batches
from tidemill_worker.model.loader import refused, weight_bytes
from tidemill_worker.model.survey import AttentionLayer, survey

META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True)
class Outline:
    """What is known of a model before a weight is read.

    Attributes:
        layers: of its attention, as `survey` finds them in the loaded model.
        context: tokens of its longest sequence.
        num_parameters: shared ones counted once.
        weight_bytes: what they take in the type that the model runs in.
    """

    layers: tuple[AttentionLayer, ...]
    context: int
    num_parameters: int
    weight_bytes: int


def outline(config: PretrainedConfig, *, dtype: torch.dtype) -> Outline:
    """Build the model of this configuration without weights, and survey it.

    Raises:
        ModelUnsupported: for the reasons, and in the words, of `load_model`, as far as they show without
            weights: the probe has nothing to compare.
    """
    check_config(config)
    register_architectures()
    with refused("model: its forward fails"):
        model = _without_weights(config, dtype)
        with ZerosForWeights():  # type: ignore[no-untyped-call]  # torch's own __init__
            layers = survey(model, device=CPU)
    return Outline(
        layers=layers,
        context=context_length(config),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=weight_bytes(model),
    )


def quantized_weight_bytes(place: Path, config: PretrainedConfig) -> int | None:
    """What weights take that are kept as they are packed in their files; `None` if they are not packed.

    Raises:
        ConfigurationError: the files are not there to be measured.
    """
    method = quantization(config)
    if method is None:
        return None
    size = sum(file.stat().st_size for file in place.glob("*.safetensors"))
    if not size:
        raise ConfigurationError(
            f"model: its weights are quantized ({method}), so that only their files tell what they take;"
            f" there is no safetensors file in {place}: download the whole model first"
        )
    return size


def _without_weights(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with META:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            experts_implementation="eager",  # grouped products know no float32 without data
            trust_remote_code=False,
        )
    model.eval().requires_grad_(False)
    deliver_batches(model)
    return model


class ZerosForWeights(TorchDispatchMode):
    """While it is entered, what is computed from weights and real tensors is zeros, of the right shape.

    What comes from weights alone stays without content, what comes from real tensors alone is computed.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        homes = {home.type for home in map(_home, tree_leaves((args, kwargs))) if home is not None}
        if homes != {"cpu", "meta"}:
            return func(*args, **kwargs)
        result = func(*tree_map(_moved_to(META), args), **tree_map(_moved_to(META), kwargs))
        return tree_map(_zeros, result)


def _home(leaf: object) -> torch.device | None:
    """The device of an argument of an operation: of a tensor, or the one asked for."""
    if isinstance(leaf, torch.Tensor):
        return leaf.device
    return leaf if isinstance(leaf, torch.device) else None


def _moved_to(device: torch.device) -> Callable[[object], object]:
    def move(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device)
        return device if isinstance(leaf, torch.device) else leaf

    return move


def _zeros(leaf: object) -> object:
    return torch.zeros_like(leaf, device=CPU) if isinstance(leaf, torch.Tensor) else leaf
