"""What a model asks of its attention, found out by running it, so that no configuration is guessed at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from tidemill.errors import ModelUnsupported
from tidemill_worker.model.architecture import context_length
from tidemill_worker.model.attention import AttentionCall, attending
from tidemill_worker.model.masks import masks_with_rules, rule_of, visible

NUM_TOKENS = 3
HONOURED = frozenset({"sliding_window", "softcap", "s_aux"})
"""Keywords of an attention call that `attention.PagedStep` acts on."""
WITHOUT_EFFECT = frozenset(
    {
        "position_ids",  # the keys come rotated already
        "cache_position",
        "dropout",  # none in inference
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""Keywords that tell an attention function nothing about which keys a row sees or how it weighs them."""


@dataclass(frozen=True)
class AttentionLayer:
    """One call of attention, the same in every forward of its model."""

    module: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass
class Survey:
    """Takes down the calls of one forward, and answers them with zeros."""

    calls: list[AttentionCall] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        _, num_heads, num_tokens, _ = call.query.shape
        return call.query.new_zeros(num_tokens, num_heads, call.value.shape[-1])


def survey(model: PreTrainedModel, *, device: torch.device | None = None) -> tuple[AttentionLayer, ...]:
    """Run a few tokens through `model` and return the calls of its attention, in their order.

    Args:
        model: with Tidemill's attention.
        device: where the tokens are, if not where the model is.

    Raises:
        ModelUnsupported: an attention is asked for that cannot be given.
    """
    answers = Survey()
    tokens = torch.arange(NUM_TOKENS, device=device or model.device).unsqueeze(0)
    with torch.inference_mode(), attending(answers), masks_with_rules(model):
        model(input_ids=tokens, position_ids=tokens, use_cache=False, logits_to_keep=1)
    for call in answers.calls:
        _check_call(call)
    config = model.config.get_text_config(decoder=True)
    _check_coverage(config, answers.calls)
    for index, call in _distinct(answers.calls):
        _check_mask(call, index * config.num_hidden_layers // len(answers.calls), context_length(config))
    layers = tuple(map(_layer, answers.calls))
    if len({layer.num_kv_heads for layer in layers}) > 1:
        raise ModelUnsupported("model: its layers differ in the number of their KV heads")
    return layers


def _layer(call: AttentionCall) -> AttentionLayer:
    return AttentionLayer(
        module=type(call.module).__name__,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        key_dim=call.key.shape[3],
        value_dim=call.value.shape[3],
        window=call.window,
        softcap=call.softcap,
        has_sinks=call.sinks is not None,
    )


def _check_call(call: AttentionCall) -> None:
    """Refuse whatever a call says that `attention.PagedStep` would not do."""
    name = type(call.module).__name__
    if rule_of(call.attention_mask) is None:
        raise ModelUnsupported(f"model: {name} brings an attention mask of its own, or none")
    if _says_no(call.keywords.get("is_causal")) or _says_no(getattr(call.module, "is_causal", None)):
        raise ModelUnsupported(f"model: {name} also looks at the tokens that follow (it is not causal)")
    unknown = [
        keyword
        for keyword, value in call.keywords.items()
        if keyword not in HONOURED | WITHOUT_EFFECT | {"is_causal"} and not _is_absent(value)
    ]
    if unknown:
        raise ModelUnsupported(f"model: {name} asks its attention for {', '.join(unknown)}")
    if call.query.shape[0] != 1 or not _same_tokens(call):
        raise ModelUnsupported(f"model: {name} attends to other tokens than those of its input")


def _check_coverage(config: PretrainedConfig, calls: list[AttentionCall]) -> None:
    """Refuse a model of which not every layer attends: what else it does with neighbours is not known."""
    expected = config.num_hidden_layers
    counts = Counter(id(call.module) for call in calls)
    if len(counts) != expected or len(set(counts.values())) != 1:
        raise ModelUnsupported(
            f"model: {len(counts)} of its {expected} layers attend through transformers' interface"
        )


def _check_mask(call: AttentionCall, layer: int, context: int) -> None:
    """Refuse a layer whose mask, which we do without, hides other keys than those it tells us to leave out.

    Raises:
        ModelUnsupported: with a position, anywhere in the context, from where they differ.
    """
    rule = rule_of(call.attention_mask)
    assert rule is not None
    for position in sorted({context // 3, context // 2, context - 1}):
        keys = torch.arange(context, device=call.query.device)
        told = keys <= position
        if call.window is not None:
            told &= keys > position - call.window
        masked = visible(rule, position, keys)
        if not torch.equal(masked, told):
            raise ModelUnsupported(
                f"model: layer {layer} sees {int(masked.sum())} keys from position {position} by its mask,"
                f" but {int(told.sum())} by what it tells its attention"
            )


def _distinct(calls: list[AttentionCall]) -> Iterator[tuple[int, AttentionCall]]:
    """The first call, with its index, of each combination of a mask and a window."""
    seen = set()
    for index, call in enumerate(calls):
        key = (id(rule_of(call.attention_mask)), call.window)
        if key not in seen:
            seen.add(key)
            yield index, call


def _same_tokens(call: AttentionCall) -> bool:
    return call.query.shape[2] == call.key.shape[2] == call.value.shape[2] == NUM_TOKENS


def _says_no(value: Any) -> bool:
    return value is not None and not value


def _is_absent(value: Any) -> bool:
    return value is None or value is False
