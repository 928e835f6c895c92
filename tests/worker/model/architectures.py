"""The architectures that are served, as tiny random models that show what is particular to each.

Small, but lively: weights with a standard deviation of 0.2, biases and sinks that are not zero,
windows shorter than the prompts, caps low enough to bite.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 128
CONTEXT = 256
WINDOW = 7

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
"""What most configurations have; others ignore it, or are given their own names for it."""

HALF_WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}


@dataclass(frozen=True)
class Architecture:
    """One tiny model.

    Attributes:
        name: unique, the model type and what is special about this variant.
        model_type: transformers' name for the architecture.
        overrides: of the configuration, over `BASE`.
        window: the sliding window of some or all of its layers.
        softcap: the cap on its attention scores.
        sinks: whether each head has an attention sink.
        moe: whether it is a mixture of experts.
        rotary: whether positions reach it as angles, or else as learned vectors.
        tied: whether the head shares the embedding's weights.
    """

    name: str
    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    moe: bool = False
    rotary: bool = True
    tied: bool = False

    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(
            self.model_type, **{**BASE, "tie_word_embeddings": self.tied, **self.overrides}
        )

    def make(self, folder: Path) -> Path:
        """Write the model to `folder`."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        enliven(model)
        model.save_pretrained(folder)
        return folder


def enliven(model: PreTrainedModel) -> None:
    """Weights large enough that attention matters, and no bias, gain or sink left at its initial value."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)


_ALL = (
    Architecture("llama", "llama", {"head_dim": 16}),
    Architecture("llama, one kv head, tied", "llama", {"num_key_value_heads": 1}, tied=True),
    Architecture(
        "llama, biases, odd heads",
        "llama",
        {"num_key_value_heads": 6, "head_dim": 10, "attention_bias": True, "mlp_bias": True},
    ),
    Architecture("mistral", "mistral", {"sliding_window": WINDOW}, window=WINDOW),
    Architecture(
        "qwen2",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        window=WINDOW,
        tied=True,
    ),
    Architecture("qwen3", "qwen3", {"head_dim": 16}),
    Architecture("qwen2_moe", "qwen2_moe", {**ROUTED, "shared_expert_intermediate_size": 40}, moe=True),
    Architecture("qwen3_moe", "qwen3_moe", {**ROUTED, "head_dim": 16, "norm_topk_prob": True}, moe=True),
    Architecture(
        "mixtral",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        window=WINDOW,
        moe=True,
    ),
    Architecture("gemma", "gemma", {"num_key_value_heads": 1, "head_dim": 16}, tied=True),
    Architecture(
        "gemma2",
        "gemma2",
        {
            **HALF_WINDOWED,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
        },
        window=WINDOW,
        softcap=1.5,
        tied=True,
    ),
    Architecture("gemma3_text", "gemma3_text", {**HALF_WINDOWED, "head_dim": 16}, window=WINDOW, tied=True),
    Architecture("phi", "phi", {"partial_rotary_factor": 0.5}),
    Architecture("phi3", "phi3", {"sliding_window": WINDOW}, window=WINDOW),
    Architecture("gpt2", "gpt2", rotary=False, tied=True),
    Architecture("gpt_neox", "gpt_neox", {"rotary_pct": 0.5}),
    Architecture("opt", "opt", {"ffn_dim": 64, "word_embed_proj_dim": 24}, rotary=False, tied=True),
    Architecture("olmo", "olmo", {"clip_qkv": 1.0}),
    Architecture("olmo2", "olmo2"),
    Architecture("olmo3", "olmo3", HALF_WINDOWED, window=WINDOW),
    Architecture(
        "granite",
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    Architecture(
        "granitemoe",
        "granitemoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.3},
        moe=True,
    ),
    Architecture("cohere", "cohere", {"logit_scale": 0.5, "use_qk_norm": True}, tied=True),
    Architecture("cohere2", "cohere2", {**HALF_WINDOWED, "logit_scale": 0.5}, window=WINDOW, tied=True),
    Architecture("starcoder2", "starcoder2", {"sliding_window": WINDOW}, window=WINDOW),
    Architecture("glm", "glm", {"head_dim": 8}),
    Architecture("glm4", "glm4", {"head_dim": 8}),
    Architecture(
        "glm4_moe",
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "use_qk_norm": True,
            "head_dim": 8,
        },
        moe=True,
    ),
    Architecture(
        "gpt_oss",
        "gpt_oss",
        {
            **HALF_WINDOWED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        window=WINDOW,
        sinks=True,
        moe=True,
    ),
    Architecture("smollm3", "smollm3", {"no_rope_layers": [1, 0]}, tied=True),
    Architecture("exaone4", "exaone4", HALF_WINDOWED, window=WINDOW),
    Architecture("helium", "helium", {"head_dim": 8}),
    Architecture("persimmon", "persimmon", {"partial_rotary_factor": 0.5}),
    Architecture("gpt_bigcode", "gpt_bigcode", {"multi_query": True}, rotary=False, tied=True),
    Architecture("gpt_bigcode, many kv heads", "gpt_bigcode", {"multi_query": False}, rotary=False),
    Architecture("ernie4_5", "ernie4_5", {"head_dim": 16, "use_bias": True}),
    Architecture(
        "ernie4_5_moe",
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
        moe=True,
    ),
    Architecture("hunyuan_v1_dense", "hunyuan_v1_dense", {"head_dim": 16}),
    Architecture("seed_oss", "seed_oss", {"head_dim": 16}),
    Architecture("arcee", "arcee"),
    Architecture("apertus", "apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
    Architecture("bitnet", "bitnet"),
    Architecture(
        "dots1",
        "dots1",
        {
            **HALF_WINDOWED,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        window=WINDOW,
        moe=True,
    ),
    Architecture("biogpt", "biogpt", rotary=False, tied=True),
    Architecture("diffllama", "diffllama", {"num_key_value_heads": 2, "num_attention_heads": 4}),
    Architecture("deepseek_v2", "deepseek_v2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}, moe=True),
    Architecture("deepseek_v3", "deepseek_v3", DEEPSEEK, moe=True),
    Architecture("falcon", "falcon", {"alibi": False, "multi_query": True}, tied=True),
    Architecture("falcon, many kv heads", "falcon", {"alibi": False, "multi_query": False, "bias": True}),
    Architecture(
        "falcon, new decoder",
        "falcon",
        {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2},
    ),
    Architecture("gptj", "gptj", {"rotary_dim": 4}),
    Architecture("olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, moe=True),
    Architecture("phimoe", "phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, moe=True),
    Architecture("stablelm", "stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    Architecture("nemotron", "nemotron"),
)

ARCHITECTURES: dict[str, Architecture] = {architecture.name: architecture for architecture in _ALL}
