"""What a model's own masks hide, told as the rule that they are made from.

Tidemill's attention is given no masks, only a position and, as a keyword, a window. Whether the two
say the same shows in a mask only if it is longer than the window. So it is not the mask that is looked
at, but the rule from which transformers makes it: that can be asked about any position at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from tidemill_worker.model.attention import paged_forward

WITH_MASKS = "tidemill_with_masks"
"""The same attention, with masks."""

Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a batch index, a head, the position of a query and the positions of keys: which of these it sees."""


def register_masks() -> None:
    """Make our attention with masks known to transformers. Safe to call again."""
    AttentionInterface.register(WITH_MASKS, paged_forward)
    AttentionMaskInterface.register(WITH_MASKS, _mask_with_rule)


def masks_with_rules(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Within, `model` gives its attention the masks that transformers would, with their rules."""
    return attention_implementation(model, WITH_MASKS)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within, `model` runs with the attention that transformers knows under this name."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def rule_of(mask: torch.Tensor | None) -> Rule | None:
    """The rule that a mask was made from; `None` without a mask, or if it is not one of transformers'."""
    return getattr(mask, "_tidemill_rule", None)


def visible(rule: Rule, position: int, keys: torch.Tensor) -> torch.Tensor:
    """Which of the keys at these positions, int64 `[n]`, a rule lets the token at `position` see.

    Returns:
        bool `[n]`.
    """
    first = keys.new_zeros(())
    with _LookUpInRange():
        return rule(first, first, keys.new_tensor(position), keys).expand_as(keys)


class _LookUpInRange(TorchFunctionMode):
    """While it is entered, what a rule looks up about a token past the last it has of the last.

    Models that also take in images look up which of them a token belongs to: none, in a text.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            data, index = args
            indices = index if isinstance(index, tuple) else (index,)
            args = data, tuple(map(_clamped, indices, data.shape))
        return func(*args, **(kwargs or {}))


def _clamped(index: Any, size: int) -> Any:
    return index.clamp(max=size - 1) if isinstance(index, torch.Tensor) else index


def _mask_with_rule(*args: Any, **kwargs: Any) -> torch.Tensor:
    kwargs["allow_is_bidirectional_skip"] = False  # without a mask there would be no rule
    mask = eager_mask(*args, **kwargs)
    mask._tidemill_rule = kwargs["mask_function"]  # type: ignore[attr-defined]  # a tensor takes attributes
    return mask
