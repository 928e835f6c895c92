"""What a model's configuration says about whether it can be served, before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from tidemill.errors import ModelUnsupported
from tidemill_worker.model.attention import register_attention
from tidemill_worker.model.falcon import register_falcon
from tidemill_worker.model.masks import register_masks

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that keep nothing of a token but its key and value."""
CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""What configurations call it."""


def register_architectures() -> None:
    """Make our attention known to transformers, and to the architecture that does not ask it."""
    register_attention()
    register_masks()
    register_falcon()


def check_needs_no_code(stored: Mapping[str, Any]) -> None:
    """Refuse a `config.json` whose model is not one of transformers' own.

    Many models of known architectures carry code too, from the time before; it is not needed.

    Raises:
        ModelUnsupported: if it brings code that would have to be run.
    """
    if not {"AutoConfig", "AutoModelForCausalLM"} & set(stored.get("auto_map") or ()):
        return
    model_type = str(stored.get("model_type"))
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    names = stored.get("architectures") or [known]
    if model_type not in CONFIG_MAPPING or known not in names:
        raise ModelUnsupported(
            f"model: architecture {model_type!r} needs code from its repository (auto_map), which is not run"
        )


def check_config(config: PretrainedConfig) -> None:
    """Refuse what is known to have no place in a paged KV cache.

    Raises:
        ModelUnsupported: naming the architecture and the reason.
    """
    reason = _obstacle(config)
    if reason is not None:
        raise ModelUnsupported(f"model: architecture {config.model_type!r} cannot be served: {reason}")


def _obstacle(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "transformers has no causal language model of it"
    text = config.get_text_config(decoder=True)
    if getattr(text, "alibi", False):
        return "its attention adds a bias that grows with the distance (alibi)"
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES)
    if foreign:
        return f"it has layers of other types than full and sliding attention ({', '.join(foreign)})"
    method = quantization(config)
    if method is not None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return f"its weights are quantized in a way that transformers does not know ({method})"
    return None


def quantization(config: PretrainedConfig) -> str | None:
    """How the weights are packed. transformers takes packed numbers for weights if it knows no better."""
    stored = getattr(config, "quantization_config", None)
    return stored.get("quant_method") if isinstance(stored, Mapping) else None


def context_length(config: PretrainedConfig) -> int:
    """How many tokens a sequence may have, as far as the model's positions reach.

    Raises:
        ModelUnsupported: if the configuration does not say.
    """
    text = config.get_text_config(decoder=True)
    for name in CONTEXT_LENGTHS:
        length = getattr(text, name, None)
        if isinstance(length, int) and length > 0:
            return min([length, *_longrope_switches(text)])
    raise ModelUnsupported(f"model: architecture {config.model_type!r} states no context length")


def _longrope_switches(text: PretrainedConfig) -> Iterator[int]:
    """Lengths up to which all sequences are rotated alike.

    Past it, LongRoPE turns a sequence by other angles from its first token on. transformers does so
    to a whole batch as soon as one position is past it, and what is cached was turned by the old ones.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, Mapping)]  # one per type of layer
    for rope in nested or [parameters]:
        if rope.get("rope_type") == "longrope":
            yield rope["original_max_position_embeddings"]


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many tokens the model can take in and give out, those included that its tokenizer never makes."""
    embeddings: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]  # a Module attribute
    size = embeddings.shape[0]
    return min(size, getattr(model.get_output_embeddings(), "out_features", size))
