"""Mixtures of experts: the definition, and the same bits whatever other tokens choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeSparseMoeBlock

from tidemill_worker.model.activation import replace_activations
from tidemill_worker.model.experts import PackedExperts, replace_experts
from tidemill_worker.model.linear import pack_linears

EXPERTS, CHOSEN = 6, 3


class Block(nn.Module):
    """Experts in the place of a layer's feed-forward network, with the routing given."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Tensor) -> Tensor:
        return self.experts(*args)


def randomize(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for weight in [*module.parameters(), *module.buffers()]:
        nn.init.normal_(weight, std=0.3)
    return module.eval().requires_grad_(False)


def make_experts(model_type: str, hidden_size: int) -> nn.Module:
    kind = {"qwen2_moe": Qwen2MoeExperts, "gpt_oss": GptOssExperts}[model_type]
    return randomize(kind(make_config(model_type, hidden_size)))


def make_config(model_type: str, hidden_size: int) -> Any:
    return AutoConfig.for_model(
        model_type,
        hidden_size=hidden_size,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        n_group=2,
        topk_group=1,
        intermediate_size=40,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
    )


def make_routing(tokens: int) -> tuple[Tensor, Tensor]:
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)])
    return index, torch.rand(tokens, CHOSEN)


def packed(block: nn.Module) -> nn.Module:
    """The block, with all that is to be replaced in it replaced."""
    replace_experts(block)
    pack_linears(block)
    replace_activations(block)
    return block


def one_by_one(experts: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The definition, in float64."""
    experts = experts.double()
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(index[token], weights[token].double(), strict=True):
            up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
            if not experts.is_transposed:
                up, down = up.T, down.T
            biased = [getattr(experts, f"{name}_proj_bias", None) for name in ("gate_up", "down")]
            states = x[token].double() @ up + (0 if biased[0] is None else biased[0][expert])
            states = experts._apply_gate(states) @ down + (0 if biased[1] is None else biased[1][expert])
            out[token] += weight * states
    return out


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_each_token_goes_through_its_experts(model_type: str) -> None:
    x, routing = torch.randn(17, 48), make_routing(17)
    ours = packed(Block(make_experts(model_type, 48)))(x, *routing)
    expected = one_by_one(make_experts(model_type, 48), x, *routing)
    torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("hidden_size", [48, 100, 1100])
@pytest.mark.usefixtures("threads")
def test_a_token_has_the_same_bits_whatever_the_others_choose(model_type: str, hidden_size: int) -> None:
    experts = packed(Block(make_experts(model_type, hidden_size)))
    x = torch.randn(40, hidden_size)
    index, weights = make_routing(40)
    whole = experts(x, index, weights)
    for token in range(0, 40, 3):
        one = slice(token, token + 1)
        assert torch.equal(experts(x[one], index[one], weights[one]), whole[one]), token
    for count in (2, 5, 17, 40):
        some = torch.randperm(40)[:count]
        assert torch.equal(experts(x[some], index[some], weights[some]), whole[some]), count


@pytest.mark.parametrize(
    ("block", "model_type"), [(Qwen2MoeSparseMoeBlock, "qwen2_moe"), (DeepseekV3MoE, "deepseek_v3")]
)
@pytest.mark.usefixtures("threads")
def test_so_have_the_choice_of_experts_and_what_is_shared(block: Any, model_type: str) -> None:
    """Router and gate are functions that the block calls by itself."""
    layer = packed(randomize(block(make_config(model_type, 48))))
    x = torch.randn(1, 40, 48)
    whole = layer(x)
    for token in range(40):
        assert torch.equal(layer(x[:, token : token + 1])[0, 0], whole[0, token]), token


def test_a_router_that_is_a_linear_layer_and_more_runs_row_by_row() -> None:
    block = Block(make_experts("qwen2_moe", 48))
    block.router = randomize(PhimoeTopKRouter(make_config("phimoe", 48)))
    block.forward = block.router.forward
    layer, x = packed(block), torch.randn(40, 48)
    whole, _, _ = layer(x)
    assert all(torch.equal(layer(x[row : row + 1])[0], whole[row : row + 1]) for row in range(40))


def test_a_block_remains_the_same_function() -> None:
    block = randomize(Qwen2MoeSparseMoeBlock(make_config("qwen2_moe", 48)))
    block.experts.config._experts_implementation = "eager"
    x = torch.randn(1, 9, 48)
    expected = block(x)
    torch.testing.assert_close(packed(block)(x), expected, atol=2e-5, rtol=1e-5)


def test_the_stacked_weights_are_freed() -> None:
    model = nn.Sequential(make_experts("gpt_oss", 48))
    replace_experts(model)
    assert type(model[0]) is PackedExperts
    assert list(model.parameters()) == []


def test_experts_with_a_norm_of_their_own_are_left_alone() -> None:
    experts = make_experts("qwen2_moe", 48)
    experts.has_post_expert_norm = True
    model = nn.Sequential(experts)
    replace_experts(model)
    assert model[0] is experts
