"""Loads a model for paged execution, or says in one line why it cannot be served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tidemill.errors import ModelUnsupported
from tidemill_worker.model.activation import replace_activations
from tidemill_worker.model.attention import IMPLEMENTATION, register_attention
from tidemill_worker.model.linear import pack_linears

SUPPORTED_MODEL_TYPES = frozenset({"llama"})
"""Architectures whose output has been compared with transformers' own, bit by bit within ours."""


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The type that the model in `folder` was stored in, if its configuration says so."""
    with _unreadable_refused(folder):
        dtype = AutoConfig.from_pretrained(folder).dtype
    return dtype if isinstance(dtype, torch.dtype) else None


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model in `folder` with Tidemill's attention, ready for inference.

    On CPU its linear layers and activations are exchanged for ones in which each row's bits are
    its own; on a GPU transformers' own stay.

    Raises:
        ModelUnsupported: if the architecture or the combination of device and dtype is not served, or
            if the files are damaged.
    """
    with _unreadable_refused(folder):
        config = AutoConfig.from_pretrained(folder)
    _check_supported(config, device, dtype)
    register_attention()
    with _unreadable_refused(folder):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION
        )
    model.eval().requires_grad_(False)
    if device.type == "cpu":
        pack_linears(model)
        replace_activations(model)
    torch.nn.Module.to(model, device)
    return model


def end_of_text_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens after which the model has nothing more to say."""
    declared = model.generation_config.eos_token_id if model.generation_config else None
    if declared is None:
        declared = model.config.eos_token_id
    if declared is None:
        return frozenset()
    return frozenset(declared if isinstance(declared, list) else [declared])


@contextmanager
def _unreadable_refused(folder: Path) -> Iterator[None]:
    """Say in one line what is wrong with a model's files."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelUnsupported(f"model: {folder} cannot be loaded: {reason}") from error


def _check_supported(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelUnsupported(
            f"model: architecture {config.model_type!r} is not served yet;"
            f" served are: {', '.join(sorted(SUPPORTED_MODEL_TYPES))}"
        )
    if device.type == "cpu" and dtype is not torch.float32:
        raise ModelUnsupported(f"dtype: on CPU the model runs in float32, not {dtype}")
