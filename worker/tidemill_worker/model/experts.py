"""Mixtures of experts whose output rows have the same bits whatever else is in the batch.

transformers' own multiply the tokens that chose an expert by that expert's weights with products
that depend on how many there are, and add up a token's experts in the order in which the batch
happens to reach them. Here each expert is a pair of packed linear layers, and a token's experts
are added in the order of its own routing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tidemill_kernels.activations import sigmoid
from tidemill_worker.model.linear import PLAIN, PackedLinear


class PackedExperts(nn.Module):
    """Feed-forward networks of which each token goes through a few. Inference only, float32, CPU."""

    def __init__(self, experts: nn.Module) -> None:
        """Take the weights out of a module of transformers' experts interface; its gate stays in use."""
        super().__init__()
        self._up = _packed(experts, "gate_up_proj")
        self._down = _packed(experts, "down_proj")
        self.unpacked = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Add up what each token's experts make of it, by weight.

        Args:
            hidden_states: `[n, hidden_size]`.
            top_k_index: int64 `[n, k]`, the experts of each token.
            top_k_weights: `[n, k]`.

        Returns:
            `[n, hidden_size]`.
        """
        chosen = top_k_index.reshape(-1)
        by_expert = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=len(self._up)).tolist()
        states = _each(self._up, hidden_states[by_expert // top_k_index.shape[1]], counts)
        states = _each(self._down, self.unpacked._apply_gate(states), counts)  # type: ignore[operator]
        by_choice = torch.empty_like(states)
        by_choice[by_expert] = states
        return _weighted_sum(by_choice.view(*top_k_index.shape, -1), top_k_weights)


def replace_experts(model: nn.Module) -> None:
    """Replace the experts of every layer of `model`, and run the block around them row by row.

    That block chooses the experts, by a product with a weight that has no layer and functions of
    its result.
    """
    for block in list(model.modules()):
        for name, child in list(block.named_children()):
            if _are_experts(child):
                setattr(block, name, PackedExperts(child))
                _run_rowwise(block)


def _are_experts(module: nn.Module) -> bool:
    """Whether it has what the experts interface declares, and nothing that `PackedExperts` leaves out."""
    return bool(getattr(module, "has_gate", False)) and not getattr(module, "has_post_expert_norm", True)


def _packed(experts: nn.Module, name: str) -> nn.ModuleList:
    """One layer per expert of the stacked weights of that name, which are freed."""
    weights: Tensor = getattr(experts, name)
    delattr(experts, name)
    if experts.is_transposed:
        weights = weights.transpose(1, 2)
    biases: list[Tensor | None] = [None] * len(weights)
    if experts.has_bias:
        biases = list(getattr(experts, f"{name}_bias"))
        delattr(experts, f"{name}_bias")
    return nn.ModuleList(map(PackedLinear, weights, biases))


def _each(experts: nn.ModuleList, rows: Tensor, counts: list[int]) -> Tensor:
    """Send the first counts[0] rows through the first expert, the next through the second, and so on."""
    with torch._C.DisableTorchFunction():  # they need none of the functions below: 1 microsecond a call
        parts = zip(experts, rows.split(counts), counts, strict=True)
        return torch.cat([expert(part) for expert, part, count in parts if count])


def _weighted_sum(states: Tensor, weights: Tensor) -> Tensor:
    """`[n, k, hidden_size]` to `[n, hidden_size]`, added in the order of k."""
    total = states[:, 0] * weights[:, :1]
    for choice in range(1, states.shape[1]):
        total = total + states[:, choice] * weights[:, choice : choice + 1]
    return total


def _run_rowwise(block: nn.Module) -> None:
    functions = _RowwiseFunctions({id(weight): PackedLinear(weight, None) for weight in _bare_weights(block)})
    forward = block.forward

    def forward_rowwise(*args: Any, **kwargs: Any) -> Any:
        with functions:
            return forward(*args, **kwargs)

    block.forward = forward_rowwise  # of this one module


def _bare_weights(block: nn.Module) -> Iterator[nn.Parameter]:
    """The matrices in `block` that belong to no mere linear layer."""
    for module in block.modules():
        if type(module) not in PLAIN:
            yield from (weight for weight in module.parameters(recurse=False) if weight.ndim == 2)


class _RowwiseFunctions(TorchFunctionMode):
    """While it is entered, the functions that a module calls by itself give each row its own bits."""

    def __init__(self, packed: Mapping[int, PackedLinear]) -> None:
        """`packed` by the identity of the weight, which the module keeps alive."""
        super().__init__()
        self._packed = packed

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is torch.sigmoid or func is Tensor.sigmoid:
            return sigmoid(*args)
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = self._packed.get(id(weight))
        if packed is None:
            return functional.linear(x, weight, bias)
        y: Tensor = packed(x)
        return y if bias is None else y + bias
