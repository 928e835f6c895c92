"""Loads a model for paged execution, or says in one line why it cannot be served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tidemill.errors import ModelUnsupported
from tidemill_worker.model.activation import replace_activations
from tidemill_worker.model.architecture import check_config, check_needs_no_code, register_architectures
from tidemill_worker.model.attention import IMPLEMENTATION, deliver_batches
from tidemill_worker.model.device import check_room
from tidemill_worker.model.experts import replace_experts
from tidemill_worker.model.linear import pack_linears
from tidemill_worker.model.probe import probe
from tidemill_worker.model.survey import AttentionLayer, survey


@dataclass(frozen=True)
class LoadedModel:
    """A model that has been tried out, and the layers of its attention."""

    model: PreTrainedModel
    layers: tuple[AttentionLayer, ...]


def stored_dtype(config: PretrainedConfig) -> torch.dtype | None:
    """The type that the model was stored in, if its configuration says so."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else None


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load the model in `folder` with Tidemill's attention, ready for inference, and try it out.

    On CPU its linear layers and activations are exchanged for ones in which each row's bits are
    its own; on a GPU transformers' own stay.

    Raises:
        ModelUnsupported: if the architecture or the combination of device and dtype is not served, or
            if the files are damaged.
        ConfigurationError: if the weights do not fit on the device.
    """
    config = load_config(folder)
    check_config(config)
    if device.type == "cpu" and dtype is not torch.float32:
        raise ModelUnsupported(f"dtype: on CPU the model runs in float32, not {dtype}")
    register_architectures()
    model = _load_weights(folder, config, dtype)
    model.eval().requires_grad_(False)
    check_room(weight_bytes(model), device)
    torch.nn.Module.to(model, device)
    deliver_batches(model)
    with refused("model: its forward fails"):
        layers = survey(model)
        if device.type == "cpu":
            _make_rowwise(model)
        probe(model, layers)
    return LoadedModel(model, layers)


def weight_bytes(model: PreTrainedModel) -> int:
    """What the weights of `model` take, shared ones counted once, and the tables beside them."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _make_rowwise(model: PreTrainedModel) -> None:
    """Exchange what computes a row in ways that depend on the other rows."""
    replace_experts(model)
    pack_linears(model)
    replace_activations(model)


def end_of_text_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens after which the model has nothing more to say."""
    declared = model.generation_config.eos_token_id if model.generation_config else None
    if declared is None:
        declared = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if declared is None:
        return frozenset()
    return frozenset(declared if isinstance(declared, list) else [declared])


def load_config(place: Path) -> PretrainedConfig:
    """The configuration of the model in a folder, or in a .gguf file.

    Raises:
        ModelUnsupported: if it cannot be read, or needs code of its own.
    """
    config: PretrainedConfig
    with refused(f"model: {place} cannot be loaded"):
        if place.suffix == ".gguf" and place.is_file():
            config = AutoConfig.from_pretrained(place.parent, gguf_file=place.name, trust_remote_code=False)
        else:
            stored, _ = PretrainedConfig.get_config_dict(place)
            check_needs_no_code(stored)
            config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    return config


def _load_weights(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel
    info: dict[str, Any]
    with refused(f"model: {folder} cannot be loaded"):
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]  # not only a model
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random ones
        raise ModelUnsupported(
            f"model: {folder} cannot be loaded: {len(missing)} of its weights are missing, {missing[0]} first"
        )
    if unused := _unused(model, info["unexpected_keys"]):  # transformers would do without them
        raise ModelUnsupported(
            f"model: {folder} cannot be loaded: {len(unused)} of its weights, {unused[0]} first, belong to"
            " a layer of the model that has no place for them"
        )
    return model


def _unused(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Those of the weights that no one expected that stand beside weights in use: biases, scales.

    What belongs to whole layers that the model does not have (vision, tables of angles) is not needed.
    """
    in_use = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    owners = ((weight, weight.rpartition(".")[0]) for weight in sorted(unexpected))
    return [weight for weight, owner in owners if {owner, f"{model.base_model_prefix}.{owner}"} & in_use]


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Say in one line what went wrong in transformers; there is no telling which exception it will be."""
    try:
        yield
    except ModelUnsupported:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and IMPLEMENTATION in error.args:
            reason = "its attention does not go through transformers' interface"
        else:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
        raise ModelUnsupported(f"{what}: {reason}") from error
