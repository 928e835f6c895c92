"""Each row of a packed linear is its own: the foundation of "the same bits"."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from tidemill_worker.model.linear import PackedLinear, pack_linears

SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (48, 80), (7, 3), (64, 4096), (1, 100), (8, 48)]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_at_every_row_count(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(outputs, inputs), torch.randn(outputs))
    x = torch.randn(1, 70, inputs)
    whole = linear(x)
    for count in (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64):
        assert torch.equal(linear(x[:, :count]), whole[:, :count]), count
    order = torch.randperm(70)
    assert torch.equal(linear(x[:, order]), whole[:, order])


def test_a_row_does_not_notice_its_neighbours() -> None:
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(64, 1536), None)
    x = torch.randn(1, 33, 1536)
    alone = linear(x[:, 16:17])
    x[:, :16] = torch.nan
    x[:, 17:] *= 1e30
    assert torch.equal(linear(x)[:, 16:17], alone)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_it_is_the_product(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(1, 9, inputs)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(
        PackedLinear(weight, bias)(x).double(), expected, atol=1e-5 * inputs**0.5, rtol=0
    )


def test_its_weight_can_be_asked_for_its_type_but_takes_no_memory() -> None:
    """hunyuan_v1_moe looks there to know how to feed its router."""
    weight = PackedLinear(torch.randn(5, 3), None).weight
    assert (weight.dtype, weight.shape, weight.device.type) == (torch.float32, (5, 3), "meta")


def test_no_rows_give_no_rows() -> None:
    assert PackedLinear(torch.randn(5, 3), None)(torch.empty(1, 0, 3)).shape == (1, 0, 5)


def test_packing_a_model_leaves_its_output_and_a_tied_embedding_in_place() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.inner = nn.Sequential(nn.Linear(6, 6))
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(self.embedding(ids)))

    torch.manual_seed(0)
    model = Tied().requires_grad_(False)
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids)
    pack_linears(model)
    torch.testing.assert_close(model(ids), expected)
    assert not any(type(module) is nn.Linear for module in model.modules())


@pytest.mark.parametrize("kind", [nn.Linear, FalconLinear, Conv1D])
def test_every_kind_of_linear_layer_is_packed(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = Conv1D(5, 24) if kind is Conv1D else kind(24, 5)  # both 24 inputs to 5 outputs
    nn.init.normal_(layer.bias)
    model = nn.Sequential(layer).requires_grad_(False)
    x = torch.randn(2, 9, 24)
    expected = model(x)
    pack_linears(model)
    assert type(model[0]) is PackedLinear
    torch.testing.assert_close(model(x), expected)


def test_a_layer_that_does_more_than_a_product_is_left_alone() -> None:
    class Quantizing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.round())

    model = nn.Sequential(Quantizing(3, 2))
    pack_linears(model)
    assert type(model[0]) is Quantizing
