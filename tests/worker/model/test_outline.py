"""Models without weights, against arithmetic by hand and against what the loader says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from tests.worker.model.refused import REFUSED, Refused
from tests.worker.model.well_known import DEEPSEEK_V2_LITE, LLAMA_3_1_8B, MIXTRAL_8X7B
from tidemill.errors import ConfigurationError, ModelUnsupported
from tidemill_worker.model.checkpoint import embedded_gguf
from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.model.loader import load_config, stored_dtype
from tidemill_worker.model.outline import ZerosForWeights, outline, quantized_weight_bytes


def write_config(folder: Path, stored: dict[str, object]) -> PretrainedConfig:
    (folder / "config.json").write_text(json.dumps(stored))
    return load_config(folder)


@pytest.mark.parametrize(
    ("stored", "bytes_per_token", "parameters"),
    [
        # layers * (key and value) * KV heads * width * 2 bytes; the published counts of parameters
        (LLAMA_3_1_8B, 32 * 2 * 8 * 128 * 2, 8_030_261_248),
        (MIXTRAL_8X7B, 32 * 2 * 8 * 128 * 2, 46_702_792_704),
        (DEEPSEEK_V2_LITE, 27 * 2 * 16 * 192 * 2, 15_706_484_224),  # keys of 128 + 64, values filled up
    ],
    ids=["llama", "mixtral", "deepseek"],
)
def test_well_known_models_are_as_large_as_they_are_known_to_be(
    stored: dict[str, object], bytes_per_token: int, parameters: int, tmp_path: Path
) -> None:
    config = write_config(tmp_path, stored)
    assert stored_dtype(config) == torch.bfloat16
    known = outline(config, dtype=torch.bfloat16)
    spec = KVCacheSpec.for_layers(known.layers, block_size=16, dtype=torch.bfloat16)
    assert spec.bytes_per_token == bytes_per_token
    assert known.num_parameters == parameters
    beside = known.weight_bytes - 2 * parameters  # tables of angles, gates of experts in float32
    assert 0 <= beside < 1e-3 * parameters
    assert known.context == stored["max_position_embeddings"]


@pytest.mark.parametrize("refused", REFUSED.values(), ids=lambda refused: refused.model_type)
def test_what_the_worker_refuses_is_refused_for_the_same_reason(refused: Refused) -> None:
    with pytest.raises(ModelUnsupported, match=refused.reason) as caught:
        outline(refused.architecture().config(), dtype=torch.float32)
    assert str(caught.value).startswith("model: ")
    assert "\n" not in str(caught.value)


def test_a_gguf_file_is_described_by_itself() -> None:
    """Three of nine heads of 64 keep keys and values, in 30 layers."""
    known = outline(load_config(embedded_gguf()), dtype=torch.float32)
    spec = KVCacheSpec.for_layers(known.layers, block_size=16, dtype=torch.float32)
    assert (spec.bytes_per_token, known.num_parameters) == (30 * 2 * 3 * 64 * 4, 134_515_008)


def test_packed_weights_take_what_their_files_take(tmp_path: Path) -> None:
    packed = write_config(tmp_path, {**LLAMA_3_1_8B, "quantization_config": {"quant_method": "fp8"}})
    told = r"quantized \(fp8\), so that only their files tell .*: download the whole model first$"
    with pytest.raises(ConfigurationError, match=told):
        quantized_weight_bytes(tmp_path, packed)
    for shard, size in enumerate((100, 23)):
        (tmp_path / f"model-{shard}.safetensors").write_bytes(bytes(size))
    assert quantized_weight_bytes(tmp_path, packed) == 123
    assert quantized_weight_bytes(tmp_path, write_config(tmp_path, LLAMA_3_1_8B)) is None


def test_only_what_depends_on_weights_is_zeros() -> None:
    weight, tokens = torch.empty(4, 3, device="meta"), torch.arange(3.0)
    with ZerosForWeights():
        assert (weight * 2).is_meta
        assert torch.equal(tokens + 1, torch.tensor([1.0, 2.0, 3.0]))
        assert torch.equal(weight @ tokens, torch.zeros(4))
        assert torch.equal(weight.to(tokens.device), torch.zeros(4, 3))
        kept = tokens.clone()
        assert kept.add_(weight[0]) is kept
