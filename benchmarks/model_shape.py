"""What a model's config.json says of the work a step is: parameters, and bytes of KV per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILT_IN = Path(__file__).parent / "models"
"""The config.json, as published, of a few models, without their weights."""
ELEMENT_BYTES = 2
"""Of a weight and of a key or value: all are bfloat16."""

UNMODELLED: dict[str, tuple[object, ...]] = {
    "kv_lora_rank": (None,),  # latent attention keeps other keys and values than heads times their size
    "first_k_dense_replace": (None, 0),
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
}
"""Fields, and the values of them for which the arithmetic below holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder whose layers are all alike: grouped attention and a gated MLP or mixture of such.

    Norms and biases are left out: less than 0.1 % of a model. Sliding windows are not modelled,
    every layer reads the whole context.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Tokens of context."""
    ties_embeddings: bool
    dense_size: int
    """Inner size of the MLP that each token passes; of a mixture, that of its shared experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def dense_parameters(self) -> int:
        """Those of the layers that each token passes, whichever experts it takes."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        router = self.hidden_size * self.num_experts
        return self.num_layers * (attention + router + 3 * self.hidden_size * self.dense_size)

    @property
    def expert_parameters(self) -> int:
        """One expert in each of the layers."""
        return self.num_layers * 3 * self.hidden_size * self.expert_size

    @property
    def head_parameters(self) -> int:
        """From the last layer's output to logits."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All that lie in memory."""
        embeddings = self.head_parameters * (1 if self.ties_embeddings else 2)
        return self.dense_parameters + self.num_experts * self.expert_parameters + embeddings

    @property
    def active_parameters(self) -> int:
        """Those of the layers that one token is multiplied with."""
        return self.dense_parameters + self.experts_per_token * self.expert_parameters

    def touched_parameters(self, num_tokens: int) -> float:
        """Those of the layers that a step of so many tokens reads.

        Of a mixture that is an expectation, each token drawing its experts evenly and by itself.
        """
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens if self.num_experts else 1.0
        return self.dense_parameters + self.num_experts * (1 - missed) * self.expert_parameters


def load_shape(name: str) -> ModelShape:
    """Read a shape by the name of a built-in, or from a config.json or the folder that holds one.

    Raises:
        ValueError: if there is none, or if it says what is not modelled.
    """
    path = BUILT_IN / f"{name}.json"
    if not path.is_file():
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in BUILT_IN.glob("*.json")))
        raise ValueError(f"model {name}: no config.json there, and none of the built-in ones: {known}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return shape_of(config.get("text_config", config))
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config says, under the names that transformers gives its fields.

    Raises:
        ValueError: naming the field that is missing, no count, or not modelled.
    """
    for name, modelled in UNMODELLED.items():
        if config.get(name) not in modelled:
            raise ValueError(f"{name} is {config[name]}, which is not modelled")
    hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    return ModelShape(
        num_layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_count(config, "num_key_value_heads", default=num_heads),
        head_dim=_count(config, "head_dim", default=hidden_size // num_heads),
        vocab_size=_count(config, "vocab_size"),
        max_model_len=_count(config, "max_position_embeddings"),
        ties_embeddings=bool(config.get("tie_word_embeddings", False)),
        **_mlp_sizes(config),
    )


def _mlp_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    counted = next((name for name in names if config.get(name)), None)
    if counted is None:
        return {"dense_size": _count(config, "intermediate_size")}
    expert_size = _count(config, "moe_intermediate_size", default=config.get("intermediate_size"))
    num_shared = _count(config, "n_shared_experts", default=0)
    return {
        "dense_size": _count(config, "shared_expert_intermediate_size", default=num_shared * expert_size),
        "num_experts": _count(config, counted),
        "experts_per_token": _count(config, "num_experts_per_tok"),
        "expert_size": expert_size,
    }


def _count(config: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{name} is missing")
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}, must be a count")
    return value
