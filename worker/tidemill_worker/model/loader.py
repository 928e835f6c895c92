"""Loads a model for paged execution, or says in one line why it cannot be served."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tidemill.errors import ModelUnsupported
from tidemill_worker.model.activation import replace_activations
from tidemill_worker.model.attention import IMPLEMENTATION, register_attention
from tidemill_worker.model.linear import pack_linears

SUPPORTED_MODEL_TYPES = frozenset({"llama"})
"""Architectures whose output has been compared with transformers' own, bit by bit within ours."""


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model in `folder` with Tidemill's attention, ready for inference.

    On CPU its linear layers and activations are exchanged for ones in which each row's bits are
    its own.

    Raises:
        ModelUnsupported: if the architecture or the combination of device and dtype is not served.
    """
    config = AutoConfig.from_pretrained(folder)
    _check_supported(config, device, dtype)
    register_attention()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION
    )
    model.train(False)
    model.requires_grad_(False)
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


def _check_supported(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelUnsupported(
            f"model: architecture {config.model_type!r} is not served yet;"
            f" served are: {', '.join(sorted(SUPPORTED_MODEL_TYPES))}"
        )
    if device.type == "cpu" and dtype is not torch.float32:
        raise ModelUnsupported(f"dtype: on CPU the model runs in float32, not {dtype}")
