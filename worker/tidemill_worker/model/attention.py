"""Tidemill's attention as a transformers attention implementation.

A model loaded with `attn_implementation="tidemill"` calls `paged_forward` in every layer with the
keys and values of this step's tokens only; the older ones are read from the KV cache through the
block tables. The step's metadata and the cache come with the keyword `paged` of the model's forward
call. It is taken off at the door and waits in a context variable, because not every architecture
hands unknown keywords down to its attention (stablelm, nemotron and falcon do not).

Layers of the cache belong to the calls in their order, one each: a layer that attends twice
(diffllama) has two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from tidemill_kernels.kv_write import kv_write
from tidemill_kernels.paged_attention import paged_attention
from tidemill_worker.model.batch import PagedBatch

IMPLEMENTATION = "tidemill"


@dataclass(frozen=True)
class AttentionCall:
    """What a layer asks of its attention.

    Attributes:
        module: the layer.
        query: `[1, num_heads, num_tokens, key_dim]`, rows of all sequences packed.
        key: `[1, num_kv_heads, num_tokens, key_dim]`.
        value: `[1, num_kv_heads, num_tokens, value_dim]`.
        attention_mask: `None` in what can be served: causality lies in the positions.
        scaling: factor on the products of queries and keys.
        keywords: all else that transformers passes to an attention function.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attention_mask: torch.Tensor | None
    scaling: float
    keywords: Mapping[str, Any]

    @property
    def window(self) -> int | None:
        """How many keys a row sees, its own included, or `None` for all."""
        return self.keywords.get("sliding_window")

    @property
    def softcap(self) -> float | None:
        """The bound of the scores."""
        return self.keywords.get("softcap")

    @property
    def sinks(self) -> torch.Tensor | None:
        """One more logit per head in the softmax, float32 `[num_heads]`."""
        sinks = self.keywords.get("s_aux")
        return None if sinks is None else sinks.float().contiguous()


Attend = Callable[[AttentionCall], torch.Tensor]
"""Answers a call with `[num_tokens, num_heads, value_dim]`."""


def _outside_a_step(call: AttentionCall) -> torch.Tensor:
    raise RuntimeError("the model was called without paged=")


_ATTEND: ContextVar[Attend] = ContextVar("tidemill_attend", default=_outside_a_step)


def register_attention() -> None:
    """Make `attn_implementation="tidemill"` known to transformers. Safe to call again."""
    AttentionInterface.register(IMPLEMENTATION, paged_forward)


def deliver_batches(model: PreTrainedModel) -> None:
    """Let the keyword `paged` of `model`'s forward call reach its attention, whatever lies between."""
    model.register_forward_pre_hook(_begin_step, with_kwargs=True)
    model.register_forward_hook(_end_step, always_call=True)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Let `attend` answer the calls of a forward that is given no `paged`."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def paged_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: see `AttentionCall` for the arguments.

    Returns:
        `[1, num_tokens, num_heads, value_dim]`, and no weights.
    """
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    call = AttentionCall(module, query, key, value, attention_mask, scaling, keywords)
    return _ATTEND.get()(call).unsqueeze(0), None


@dataclass
class PagedStep:
    """Answers the calls of one forward: writes keys and values, then attends over the cache."""

    batch: PagedBatch
    layer: int = 0
    """Of the cache, for the next call."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        batch, layer = self.batch, self.layer
        self.layer += 1
        width = batch.kv_cache.shape[-1]
        kv_write(_packed(call.key, width), _packed(call.value, width), batch.kv_cache, layer, batch.slots)
        output = paged_attention(
            _packed(call.query, width),
            batch.kv_cache,
            layer,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            scale=call.scaling,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return output[..., : call.value.shape[-1]]


def _packed(states: torch.Tensor, width: int) -> torch.Tensor:
    """`[1, heads, tokens, dim]` to contiguous `[tokens, heads, width]`; mostly a view.

    Where keys and values are of different widths, the narrower are filled up with zeros, which
    change neither a product nor a sum.
    """
    packed = states[0].transpose(0, 1)
    if packed.shape[-1] < width:
        return functional.pad(packed, (0, width - packed.shape[-1]))
    return packed.contiguous()


def _begin_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = kwargs.pop("paged", None)
    if batch is not None:
        _ATTEND.set(PagedStep(batch))
    return args, kwargs


def _end_step(model: nn.Module, args: tuple[Any, ...], output: object) -> None:
    _ATTEND.set(_outside_a_step)
