"""SiLU: right, and blind to where an element stands."""

from __future__ import annotations

import pytest
import torch

from tidemill_kernels.silu import silu


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 4095, 4096, 4097, 20_000])
def test_it_is_silu(count: int) -> None:
    x = torch.linspace(-80, 80, count)
    expected = torch.nn.functional.silu(x.double())
    # The exponential of a product rounded to float32: its relative error grows with |x|.
    bound = (1e-6 + 6e-8 * x.double().abs()) * expected.abs()
    assert torch.all((silu(x) - expected).abs() <= bound)


@pytest.mark.parametrize("width", [1, 3, 48, 80, 100, 1536])
def test_a_row_has_the_same_bits_wherever_it_stands(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, width) * 4
    whole = silu(x)
    for first, last in ((0, 1), (1, 2), (0, 5), (3, 14), (7, 60)):
        assert torch.equal(silu(x[first:last]), whole[first:last]), (first, last)


def test_special_values() -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-38, -1e-38])
    y = silu(x)
    assert y[:2].tolist() == [0.0, 0.0]
    assert y[2] == torch.inf
    assert y[4].isnan()
    torch.testing.assert_close(y[5:], x[5:] / 2)


def test_shape_and_strides_do_not_matter() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7)
    assert torch.equal(silu(x.transpose(0, 2)), silu(x).transpose(0, 2))
    assert silu(torch.empty(0, 4)).shape == (0, 4)
