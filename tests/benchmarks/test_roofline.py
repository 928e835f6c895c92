"""The cost model against arithmetic done by hand, and model shapes against what is published of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_shape import ModelShape, load_shape, shape_of
from roofline import ACCELERATORS, Accelerator, Efficiency, Roofline, StepWork, work_of

from tidemill_scheduler import BlockCopy, BlockId, Row, SequenceId, StepPlan

SLOW = Accelerator(name="slow", memory=10_000.0, bandwidth=1000.0, rate=10_000.0, link=100.0)
"""Figures of a size that a person can divide by."""


def make_shape(**changes: Any) -> ModelShape:
    """Two layers with 16 + 16 parameters of attention and 24 of the MLP each, a head of 20."""
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 4,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 1,
        "vocab_size": 5,
        "max_model_len": 100,
        "ties_embeddings": False,
        "dense_size": 2,
    }
    return ModelShape(**(sizes | changes))


def make_roofline(*, accelerator: Accelerator = SLOW, **changes: Any) -> Roofline:
    efficiency = Efficiency(bandwidth=1.0, rate=1.0, link=1.0, step_overhead=0.0)
    return Roofline(make_shape(**changes), accelerator, efficiency, block_size=4)


def make_config(**changes: Any) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "vocab_size": 5,
        "max_position_embeddings": 100,
        "intermediate_size": 3,
    }
    return sizes | changes


def make_row(start: int, count: int, *, sample: bool) -> Row:
    return Row(SequenceId(0), start, count, ((BlockId(0),),), sample)


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("qwen2.5-0.5b", 0.494e9, 12_288),  # "0.49B" on its card; 24 layers, 2 heads of 64
        ("llama-3.1-8b", 8.03e9, 131_072),  # "8.03B" on its card; 32 layers, 8 heads of 128
    ],
)
def test_built_in_shapes_have_the_published_size(name: str, parameters: float, kv_bytes: int) -> None:
    shape = load_shape(name)
    assert shape.num_parameters == pytest.approx(parameters, rel=1e-3)
    assert shape.kv_bytes_per_token == kv_bytes


def test_parameters_by_hand() -> None:
    shape = make_shape()
    assert shape.dense_parameters == 2 * (16 + 16 + 24)
    assert shape.num_parameters == 112 + 2 * 20
    assert make_shape(ties_embeddings=True).num_parameters == 112 + 20
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 1 * 2


def test_a_mixture_reads_the_experts_that_its_tokens_draw() -> None:
    shape = make_shape(dense_size=0, num_experts=4, experts_per_token=2, expert_size=2)
    attention_and_router, expert = 2 * (32 + 16), 2 * 24
    assert shape.active_parameters == attention_and_router + 2 * expert
    assert shape.touched_parameters(1) == attention_and_router + 2 * expert
    assert shape.touched_parameters(2) == attention_and_router + 3 * expert  # half of those missed at first
    assert shape.touched_parameters(1000) == pytest.approx(attention_and_router + 4 * expert)
    assert shape.num_parameters == attention_and_router + 4 * expert + 2 * 20


def test_a_config_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": make_config()}))
    shape = load_shape(str(tmp_path))
    assert (shape.num_kv_heads, shape.head_dim, shape.dense_size) == (4, 2, 3)


def test_a_config_with_shared_experts() -> None:
    mixture = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "n_shared_experts": 2,
    }
    shape = shape_of(make_config(**mixture))
    assert (shape.num_experts, shape.expert_size, shape.dense_size) == (8, 6, 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "5"}, "vocab_size is '5', must be a count"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512, which is not modelled"),
    ],
)
def test_a_config_that_cannot_be_used_says_which_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of(make_config(**changes))


def test_an_unknown_model_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model nowhere: .*llama-3\.1-8b, qwen2\.5-0\.5b"):
        load_shape("nowhere")


def test_work_is_added_up_over_rows_and_copies() -> None:
    copy = BlockCopy(BlockId(0), BlockId(1))
    rows = (make_row(10, 1, sample=True), make_row(2, 3, sample=False))
    plan = StepPlan(0, rows, swap_out=(copy, copy), swap_in=(copy,), block_copies=(copy,))
    # Positions 2, 3 and 4 see 3, 4 and 5 keys, position 10 sees 11.
    assert work_of(plan) == StepWork(4, 1, 11 + 5, 11 + 3 + 4 + 5, 3, 1)


def test_a_decode_step_takes_as_long_as_reading_does() -> None:
    # 112 + 20 parameters of 2 bytes, 16 bytes for each of 9 positions read and 1 written; 2,000 a second.
    fast = make_roofline(accelerator=replace(SLOW, bandwidth=2000.0, rate=1e9))
    assert fast.step_seconds(StepWork(1, 1, 9, 9)) == pytest.approx((264 + 160) / 2000)


def test_a_prefill_step_takes_as_long_as_multiplying_does() -> None:
    # 100 tokens with 112 parameters, one row with the head's 20; 2 * 2 * 2 * 1 * 5050 for attention.
    work = StepWork(100, 1, 100, 5050)
    assert make_roofline().step_seconds(work) == pytest.approx(2 * (11_200 + 20 + 2 * 2 * 2 * 5050) / 10_000)


def test_copies_come_on_top_and_do_without_a_forward_pass() -> None:
    roofline = make_roofline()
    assert roofline.block_bytes == 64
    assert roofline.step_seconds(StepWork(num_swapped=3)) == pytest.approx(3 * 64 / 100)
    assert roofline.step_seconds(StepWork(num_copied=3)) == pytest.approx(2 * 3 * 64 / 1000)
    rows = StepWork(1, 1, 9, 9)
    both = roofline.step_seconds(replace(rows, num_swapped=3))
    assert both == pytest.approx(roofline.step_seconds(rows) + 3 * 64 / 100)


def test_efficiency_divides_and_overhead_adds() -> None:
    half = Efficiency(bandwidth=0.5, rate=0.5, link=0.5, step_overhead=7.0)
    full, slowed = make_roofline(), replace(make_roofline(), efficiency=half)
    for work in (StepWork(1, 1, 9, 9), StepWork(100, 1, 100, 5050), StepWork(num_swapped=1, num_copied=1)):
        assert slowed.step_seconds(work) == pytest.approx(2 * full.step_seconds(work) + 7.0)


def test_restore_costs_are_those_of_a_pass_without_logits_and_of_a_copy() -> None:
    """A runner times nothing else, so what each step costs besides is no part of them."""
    efficiency = Efficiency(bandwidth=1.0, rate=1.0, link=1.0, step_overhead=7.0)
    costs = replace(make_roofline(), efficiency=efficiency).restore_costs(100)
    assert costs.seconds_per_token == pytest.approx(2 * (11_200 + 2 * 2 * 2 * 5050) / 10_000 / 100)
    assert costs.seconds_per_block == pytest.approx(64 / 100)


def test_blocks_are_what_the_weights_leave() -> None:
    # 152 parameters of 2 bytes beside blocks of 64 bytes.
    assert make_roofline().blocks_in(0.5) == (5000 - 304) // 64
    with pytest.raises(ValueError, match="leaves no block"):
        make_roofline().blocks_in(0.01)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 1\.5"):
        make_roofline().blocks_in(1.5)


@pytest.mark.parametrize("field", ["bandwidth", "rate", "link"])
@pytest.mark.parametrize("value", [0.0, 1.01])
def test_no_efficiency_is_none_or_more_than_all(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} efficiency is {value}"):
        Efficiency(**{field: value})


def test_what_the_h200_has_over_the_h100_is_memory() -> None:
    h100, h200 = ACCELERATORS["h100"], ACCELERATORS["h200"]
    assert (h200.rate, h200.link) == (h100.rate, h100.link)
    assert h200.memory > h100.memory
    assert h200.bandwidth > h100.bandwidth
