"""Every activation a configuration can name: the same function, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from tidemill_worker.model.activation import RowwiseActivation, replace_activations

NAMES = sorted(set(ACT2FN) - {"sqrtsoftplus"})
"""All but a scoring function of one router, which belongs to no architecture that is served."""
OURS = sorted({name for name in NAMES if "gelu" in name} | {"silu", "swish", "sigmoid", "mish"})


def make_layer(name: str) -> nn.Module:
    """A model of one activation, with what is there replaced."""
    model = nn.Sequential(ACT2FN[name]).requires_grad_(False)
    replace_activations(model)
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [48, 80, 100, 1536])
@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_in_any_batch(name: str, width: int) -> None:
    torch.manual_seed(0)
    layer = make_layer(name)
    x = torch.randn(40, 2 * width) * 3
    for part in (x[:, :width], x[:, ::2], x.chunk(2, dim=-1)[1]):
        whole = layer(part)
        for row in (0, 1, 17, 39):
            assert torch.equal(layer(part[row : row + 1].contiguous()), whole[row : row + 1]), row
        order = torch.randperm(40)[:33]
        assert torch.equal(layer(part[order]), whole[order])


@pytest.mark.parametrize("name", NAMES)
def test_it_stays_the_same_function(name: str) -> None:
    x = torch.linspace(-9, 9, 1000)
    torch.testing.assert_close(make_layer(name)(x), ACT2FN[name](x).detach(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", OURS)
def test_it_is_replaced_wherever_it_is(name: str) -> None:
    model = nn.ModuleDict({"outer": ACT2FN[name], "layers": nn.ModuleList([nn.Sequential(ACT2FN[name])])})
    replace_activations(model)
    leaves = [module for module in model.modules() if not list(module.children())]
    assert len(leaves) == 2
    assert all(type(leaf) is RowwiseActivation for leaf in leaves)
    assert len({repr(leaf) for leaf in leaves}) == 1


def test_both_of_torch_s_own_gelus_are_told_apart() -> None:
    model = nn.Sequential(nn.GELU(), nn.GELU(approximate="tanh"))
    replace_activations(model)
    assert [repr(module) for module in model] == ["RowwiseActivation(gelu)", "RowwiseActivation(gelu_tanh)"]
