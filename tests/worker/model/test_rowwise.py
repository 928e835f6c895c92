"""In every architecture, all but the attention gives a row the same bits whatever else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.activations import (
    ACT2CLS,
    LinearActivation,
    ReLUSquaredActivation,
    XIELUActivation,
)
from transformers.pytorch_utils import Conv1D

from tests.worker.model.architectures import ARCHITECTURES, VOCABULARY, enliven
from tidemill_worker.model.activation import replace_activations
from tidemill_worker.model.architecture import register_architectures
from tidemill_worker.model.attention import IMPLEMENTATION, AttentionCall, attending
from tidemill_worker.model.experts import replace_experts
from tidemill_worker.model.linear import PLAIN, pack_linears

TOKENS = 33
STEADY = (nn.ReLU, nn.Tanh, ReLUSquaredActivation, XIELUActivation, LinearActivation)
"""Activations whose bits never wander; `test_activation` holds them to it."""
WANDERING = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()} - set(STEADY))


@dataclass
class Trial:
    """A model and its input, with the logits before anything was replaced."""

    model: PreTrainedModel
    input_ids: Tensor
    positions: Tensor
    plain: Tensor


@pytest.fixture(scope="module", params=ARCHITECTURES)
def trial(request: pytest.FixtureRequest) -> Trial:
    register_architectures()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        ARCHITECTURES[request.param].config(), dtype=torch.float32, attn_implementation=IMPLEMENTATION
    )
    enliven(model)
    model.eval().requires_grad_(False)
    input_ids, positions = torch.randint(2, VOCABULARY, (TOKENS,)), torch.randint(0, 200, (TOKENS,))
    plain = logits(model, input_ids, positions)
    replace_experts(model)
    pack_linears(model)
    replace_activations(model)
    return Trial(model, input_ids, positions, plain)


@torch.inference_mode()
def logits(model: PreTrainedModel, input_ids: Tensor, positions: Tensor) -> Tensor:
    """Of every row, each attending to itself alone."""
    with attending(attend_to_oneself):
        output = model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=torch.arange(len(input_ids)),
        )
    return output.logits[0]


def attend_to_oneself(call: AttentionCall) -> Tensor:
    """Something of query, key and value, element by element: nothing that could wander."""
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (call.key, call.value))
    width = value.shape[-1]
    return (value + 0.3 * call.query[..., :width] * key[..., :width])[0].transpose(0, 1).contiguous()


@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_in_any_batch(trial: Trial) -> None:
    whole = logits(trial.model, trial.input_ids, trial.positions)
    some = [torch.tensor([row]) for row in range(0, TOKENS, 4)]
    some += [torch.randperm(TOKENS)[:count] for count in (2, 5, 17, TOKENS)]
    for rows in some:
        assert torch.equal(logits(trial.model, trial.input_ids[rows], trial.positions[rows]), whole[rows]), (
            rows
        )


def test_it_remains_the_same_function(trial: Trial) -> None:
    ours = logits(trial.model, trial.input_ids, trial.positions)
    assert (ours - trial.plain).abs().max() < 1e-5 * trial.plain.std()


def test_nothing_is_left_whose_bits_would_wander(trial: Trial) -> None:
    """Matrices are in packed layers, tables of embeddings, gains of a norm by head, and routers."""
    modules = list(trial.model.modules())
    kinds = (*PLAIN, Conv1D, *WANDERING)
    assert [module for module in modules if type(module) in kinds] == []
    matrices = {
        type(module).__name__
        for module in modules
        for weight in module.parameters(recurse=False)
        if weight.ndim > 1 and not isinstance(module, nn.Embedding)
    }
    assert [name for name in matrices if not name.endswith(("Norm", "Router", "MoeStatics"))] == []
