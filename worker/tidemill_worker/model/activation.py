"""Activations whose bits do not depend on the size of the batch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers import activations as transformers_activations

from tidemill_kernels import activations

_ROWWISE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.SiLU: activations.silu,
    nn.GELU: activations.gelu,
    nn.Sigmoid: activations.sigmoid,
    nn.Mish: activations.mish,
    transformers_activations.SiLUActivation: activations.silu,
    transformers_activations.GELUActivation: activations.gelu,
    transformers_activations.GELUTanh: activations.gelu_tanh,
    transformers_activations.NewGELUActivation: activations.gelu_tanh,
    transformers_activations.FastGELUActivation: activations.gelu_tanh,
    transformers_activations.AccurateGELUActivation: activations.gelu_tanh,
    transformers_activations.QuickGELUActivation: activations.quick_gelu,
    transformers_activations.MishActivation: activations.mish,
}
"""What takes the place of an activation, by its class.

The four that spell the approximate GELU out would be steady by themselves, in eight operations.
ReLU and its square, tanh, and the xIELU made of an `expm1` stay: an element has the same bits there
wherever it stands.
"""


class RowwiseActivation(nn.Module):
    """An activation by a kernel that gives an element the same bits wherever it stands; see there why."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Map any shape to itself, element by element."""
        return self._function(x)

    def extra_repr(self) -> str:
        return self._function.__name__


def replace_activations(model: nn.Module) -> None:
    """Put a `RowwiseActivation` in the place of every activation of `model` whose bits would wander."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            function = _rowwise(child)
            if function is not None:
                setattr(parent, name, RowwiseActivation(function))


def _rowwise(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return activations.gelu_tanh
    if isinstance(module, transformers_activations.ClippedGELUActivation):
        return _clipped_gelu(module.min, module.max)
    return _ROWWISE.get(type(module))


def _clipped_gelu(lowest: float, highest: float) -> Callable[[Tensor], Tensor]:
    def clipped_gelu(x: Tensor) -> Tensor:
        return activations.gelu(x).clamp(lowest, highest)

    return clipped_gelu
