"""Linear layers whose output rows have the same bits whatever else is in the batch.

`torch.nn.Linear` on CPU goes to MKL, whose blocking depends on the number of rows: the last bits
of a row then depend on its neighbours. oneDNN with weights reordered once gives each row the same
bits at any row count from two up, and is faster below some 200 rows (SmolLM2-135M, 2 threads of
Zen 3: 26 ms against 38 ms for one row, 81 against 110-147 for 32).

A single row is the exception on AVX-512: with more than 1024 inputs it is summed in another order
(seen: 1536 to 576; every count from 2 to 300 agreed). So one row is sent as two.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

REORDER_ROWS = 32
"""Row count the packing is tuned for; a packing for 32 served 1 to 256 rows equally well."""

PLAIN = (nn.Linear, FalconLinear)
"""Layers that are a product and no more; another subclass may, say, quantize its inputs first."""


class PackedLinear(nn.Module):
    """`y = x W^T + b` over weights in oneDNN's blocked layout. Inference only, float32, CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), REORDER_ROWS)
        self._bias = bias.detach() if bias is not None else None
        self.weight = weight.detach().to("meta")
        """Of the right shape and type, for models that ask after them; the numbers are packed away."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        if x.numel() == 0:  # a step that samples nothing asks the head for no rows
            return x.new_empty((*x.shape[:-1], self.out_features))
        if x.numel() == self.in_features:
            return self._product(torch.cat([x, x], dim=-2))[..., :1, :]
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of `model` by a `PackedLinear`, freeing each weight as it goes.

    A weight tied to the embedding (the head of most small models) stays in the embedding too.
    Matrices that a model multiplies by without a layer are those of experts and their routers:
    `tidemill_worker.model.experts` sees to them.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                setattr(parent, name, PackedLinear(child.weight.T, child.bias))
            elif isinstance(child, nn.Linear) and type(child) in PLAIN:
                setattr(parent, name, PackedLinear(child.weight, child.bias))
