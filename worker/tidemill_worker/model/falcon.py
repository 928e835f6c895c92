"""Falcon's attention through transformers' attention interface, which its own code does not use."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.models.falcon import modeling_falcon
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from tidemill_worker.model.attention import IMPLEMENTATION, paged_forward


def register_falcon() -> None:
    """Make `attn_implementation="tidemill"` known to Falcon. Safe to call again."""
    modeling_falcon.FALCON_ATTENTION_CLASSES[IMPLEMENTATION] = PagedFalconAttention


class PagedFalconAttention(FalconAttention):
    """The same projections and rotation; keys and values are not repeated for the heads of a group."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        attention_mask: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        layer_past: Cache | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Map `[1, num_tokens, hidden_size]` to itself; the arguments are those of the class above."""
        if self.config._attn_implementation == "eager":
            return super().forward(
                hidden_states, alibi, attention_mask, position_embeddings=position_embeddings, **kwargs
            )
        assert alibi is None
        assert position_embeddings is not None
        query, key, value = self._split_heads(self.query_key_value(hidden_states))
        if self.new_decoder_architecture:
            group = self.num_heads // (self.num_kv_heads or self.num_heads)
            key, value = key[:, :, ::group], value[:, :, ::group]
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        output, _ = paged_forward(self, query, key, value, attention_mask, self.inv_norm_factor)
        return self.dense(output.reshape(hidden_states.shape)), None
