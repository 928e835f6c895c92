"""Architectures that are refused, as tiny random models, each with the reason it must be told.

What the configuration gives away is refused before weights are loaded; the probe finds the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.worker.model.architectures import Architecture

OTHER_LAYERS = r"it has layers of other types than full and sliding attention \({}\)"
SMALL_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}


@dataclass(frozen=True)
class Refused:
    """An architecture and how its refusal reads.

    Attributes:
        model_type: transformers' name for the architecture.
        reason: a pattern for the reason.
        overrides: of the configuration, over that of the served ones.
        by_config: whether the configuration is enough to know.
        unmasked: how the probe refuses it where the configuration keeps silent.
    """

    model_type: str
    reason: str
    overrides: dict[str, Any] = field(default_factory=dict)
    by_config: bool = True
    unmasked: str | None = None

    def architecture(self) -> Architecture:
        return Architecture(self.model_type, self.model_type, {"num_hidden_layers": 4, **self.overrides})


_ALL = (
    Refused(
        "recurrent_gemma",
        OTHER_LAYERS.format("linear_attention"),
        {"lru_width": 48, "attention_window_size": 8},
        unmasked="1 of its 4 layers attend",
    ),
    Refused(
        "minimax",
        OTHER_LAYERS.format("linear_attention"),
        {"num_local_experts": 2, "block_size": 8, "head_dim": 8},
        unmasked="2 of its 4 layers attend",
    ),
    Refused(
        "lfm2",
        OTHER_LAYERS.format("conv"),
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        unmasked="2 of its 4 layers attend",
    ),
    Refused(
        "falcon_h1",
        OTHER_LAYERS.format("hybrid"),
        {**SMALL_MAMBA, "mamba_d_ssm": 96},
        unmasked="a prompt taken in chunks its logits differ",
    ),
    Refused(
        "qwen3_next",
        OTHER_LAYERS.format("linear_attention"),
        {
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        unmasked="1 of its 4 layers attend",
    ),
    Refused("mamba", OTHER_LAYERS.format("linear_attention"), unmasked="0 of its 4 layers attend"),
    Refused(
        "jamba",
        OTHER_LAYERS.format("linear_attention"),
        {
            "num_experts": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
        unmasked="2 of its 4 layers attend",
    ),
    Refused(
        "bamba",
        OTHER_LAYERS.format("linear_attention"),
        {**SMALL_MAMBA, "attn_layer_indices": [1]},
        unmasked="1 of its 4 layers attend",
    ),
    Refused(
        "llama4_text",
        OTHER_LAYERS.format("chunked_attention"),
        {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8},
        unmasked="layer 0 sees 6 keys from position 85 by its mask, but 86 by what it tells its attention",
    ),
    Refused("t5", "it is an encoder-decoder", {"d_model": 32, "num_layers": 2, "d_ff": 48}),
    Refused("bart", "it is an encoder-decoder", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}),
    Refused("falcon", r"a bias that grows with the distance \(alibi\)", {"alibi": True}),
    Refused("vit", "transformers has no causal language model of it"),
    Refused("bloom", "0 of its 4 layers attend through transformers' interface", by_config=False),
    Refused("xlm-roberta", "also looks at the tokens that follow", by_config=False),
    Refused("bert", "also looks at the tokens that follow", by_config=False),
    Refused("doge", "brings an attention mask of its own", by_config=False),
    Refused(
        "mimo_v2_flash",
        "differ in the number of their KV heads",
        {
            "head_dim": 12,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        by_config=False,
    ),
    Refused("xglm", "0 of its 4 layers attend through", {"d_model": 48, "ffn_dim": 64}, by_config=False),
    Refused(
        "gpt_neo",
        "its attention does not go through transformers' interface",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_hidden_layers": 2},
        by_config=False,
    ),
    Refused(
        "mpt",
        "0 of its 4 layers attend through",
        {"d_model": 48, "n_heads": 6, "n_layers": 2},
        by_config=False,
    ),
    Refused("rwkv", "0 of its 4 layers attend through", by_config=False),
)

REFUSED: dict[str, Refused] = {refused.model_type: refused for refused in _ALL}
