"""Activations: right, and blind to where an element stands."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tidemill_kernels.activations import gelu, gelu_tanh, mish, quick_gelu, sigmoid, silu

Function = Callable[[Tensor], Tensor]
SMALLEST = 2.0**-126
"""The smallest normal number; a smaller exponential is taken for 0."""


def _gelu(x: Tensor) -> Tensor:
    return x * torch.special.erfc(-x / math.sqrt(2)) / 2


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * _slope(x))


def _slope(x: Tensor) -> Tensor:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def _mish(x: Tensor) -> Tensor:
    e = torch.exp(-x.abs())
    return torch.where(x >= 0, x * (1 + 2 * e) / (1 + 2 * e + 2 * e * e), x * e * (e + 2) / (e * (e + 2) + 2))


# Each function: its definition in float64, and how many units in the last place it may be off.
DEFINITIONS: dict[Function, tuple[Function, Function]] = {
    sigmoid: (torch.sigmoid, lambda x: torch.tensor(4)),
    silu: (lambda x: x * torch.sigmoid(x), lambda x: torch.tensor(4)),
    quick_gelu: (lambda x: x * torch.sigmoid(1.702 * x), lambda x: torch.tensor(4)),
    gelu: (_gelu, lambda x: torch.tensor(7)),
    gelu_tanh: (_gelu_tanh, lambda x: 3 + 5 * _slope(x.clamp(max=0)).abs()),
    mish: (_mish, lambda x: torch.tensor(6)),
}
functions = pytest.mark.parametrize("function", DEFINITIONS, ids=lambda function: function.__name__)


@functions
@pytest.mark.parametrize("count", [1, 7, 8, 9, 4095, 4096, 4097, 100_001])
def test_it_is_what_it_is_called(function: Function, count: int) -> None:
    definition, tolerance = DEFINITIONS[function]
    for x in (torch.linspace(-12, 12, count), torch.linspace(-85, 85, count), torch.logspace(-35, 0, count)):
        exact = definition(x.double())
        unit = 2.0 ** (torch.floor(torch.log2(exact.abs().clamp(min=SMALLEST))) - 23)
        bound = tolerance(x.double()) * unit + x.double().abs() * SMALLEST
        assert torch.all((function(x) - exact).abs() <= bound)


@functions
@pytest.mark.parametrize("width", [1, 3, 48, 80, 100, 1536])
@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_wherever_it_stands(function: Function, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, width) * 4
    whole = function(x)
    for first, last in ((0, 1), (1, 2), (0, 5), (3, 14), (7, 60)):
        assert torch.equal(function(x[first:last]), whole[first:last]), (first, last)
    order = torch.randperm(60)
    assert torch.equal(function(x[order]), whole[order])


@functions
def test_shape_and_strides_do_not_matter(function: Function) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, 14)
    whole = function(x)
    assert torch.equal(function(x.transpose(0, 2)), whole.transpose(0, 2))
    assert torch.equal(function(x[..., ::2]), whole[..., ::2])
    assert torch.equal(function(x.chunk(2, dim=-1)[1]), whole.chunk(2, dim=-1)[1])
    assert function(torch.empty(0, 4)).shape == (0, 4)


@functions
def test_special_values(function: Function) -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, torch.nan, 1e-38, -1e-38, 3e38, -3e38])
    y = function(x)
    at_zero = 0.5 if function is sigmoid else 0.0
    assert y[:2].tolist() == [at_zero, at_zero]
    assert y[2] == (1.0 if function is sigmoid else torch.inf)
    assert y[3].isnan()
    torch.testing.assert_close(y[4:6], DEFINITIONS[function][0](x[4:6].double()).float())
    assert y[6] == (1.0 if function is sigmoid else x[6])
    assert y[7] == 0


@functions
def test_what_is_not_float32_goes_to_torch(function: Function) -> None:
    x = torch.linspace(-4, 4, 50, dtype=torch.float64)
    torch.testing.assert_close(function(x), DEFINITIONS[function][0](x))
