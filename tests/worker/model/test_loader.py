from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForSequenceClassification

from tests.worker.model.agreement import assert_agrees
from tests.worker.model.architectures import CONTEXT, VOCABULARY, Architecture
from tests.worker.model.factories import CPU, Bench, different, load, make_tiny_llama
from tidemill.errors import ConfigurationError, ModelUnsupported
from tidemill.params import SamplingParams
from tidemill_worker.model import loader
from tidemill_worker.model.architecture import context_length, vocabulary_size
from tidemill_worker.model.loader import end_of_text_tokens, load_config, load_model, stored_dtype


def test_half_precision_on_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelUnsupported, match=r"dtype: on CPU the model runs in float32, not torch\.bfloat16"
    ):
        load_model(make_tiny_llama(tmp_path), device=CPU, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "unheard-of"}'),
        ("generation_config.json", b"[]"),
        ("model.safetensors", b"cut"),
        ("model.safetensors", None),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder = make_tiny_llama(tmp_path)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelUnsupported, match="cannot be loaded: ") as refused:
        load(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_weights_are_not_moved_to_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(weights: int, device: torch.device) -> None:
        raise ConfigurationError(f"no room for {weights} bytes on {device}")

    monkeypatch.setattr(loader, "check_room", refuse)
    monkeypatch.setattr(torch.nn.Module, "to", lambda *_: pytest.fail("they were moved"))
    folder = make_tiny_llama(tmp_path)
    angles = 2 * 8 * 4  # half of a head's width, once as it is and once as it was
    weights = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    with pytest.raises(ConfigurationError, match=rf"^no room for {weights + angles} bytes on cpu$"):
        load(folder)


@pytest.mark.parametrize(("declared", "tokens"), [(5, {5}), ([5, 7], {5, 7})])
def test_end_of_text_tokens(tmp_path: Path, declared: object, tokens: set[int]) -> None:
    assert end_of_text_tokens(load(make_tiny_llama(tmp_path, eos_token_id=declared))) == tokens


def test_the_generation_configuration_decides_over_the_end_of_text(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, eos_token_id=5)
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(folder)
    assert end_of_text_tokens(load(folder)) == {7, 9}


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_useless_generation_configuration_is_as_good_as_none(tmp_path: Path, content: str | None) -> None:
    folder = make_tiny_llama(tmp_path, eos_token_id=[5, 7])
    (folder / "generation_config.json").unlink()
    if content is not None:
        (folder / "generation_config.json").write_text(content)
    assert end_of_text_tokens(load(folder)) == {5, 7}


def test_a_model_that_names_no_end_of_text_has_none(tmp_path: Path) -> None:
    assert end_of_text_tokens(load(make_tiny_llama(tmp_path, eos_token_id=None))) == frozenset()


def assert_generates_as_stored(folder: Path) -> None:
    prompts = {"p": [5, 9, 100, 7, 33, 2, 64]}
    bench = Bench(load(folder))
    tokens = bench.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0))
    assert_agrees(folder, prompts, tokens, bench.runner.rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_run_as_float32_on_cpu(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_tiny_llama(tmp_path / "float32")
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(tmp_path / "half")
    assert stored_dtype(load_config(tmp_path / "half")) == dtype
    assert load(tmp_path / "half").dtype == torch.float32
    assert_generates_as_stored(tmp_path / "half")


def make_sharded(tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_llama(tmp_path / "whole"))
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    return tmp_path / "shards"


def test_weights_may_be_spread_over_files(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_generates_as_stored(folder)


def test_a_file_too_few_is_refused(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path)
    max(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ModelUnsupported, match="cannot be loaded: "):
        load(folder)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"1 of its weights are missing, model.layers.1.mlp.up_proj"):
        load(folder)


def test_weights_that_a_layer_has_no_place_for_are_refused(tmp_path: Path) -> None:
    """A bias that the configuration does not speak of, scales of packed numbers."""
    folder = make_tiny_llama(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.bias"] = torch.ones(80)
    weights["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # old files have them; of no use
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"1 of its weights, model.layers.1.mlp.up_proj.bias first"):
        load(folder)


def quantize(folder: Path, method: str) -> Path:
    """Pack the matrices of a tiny Llama's layers as 8-bit floats with a scale for each 16 by 16 of them.

    Returns:
        a folder with what they stand for in plain float32.
    """
    block, largest = 16, torch.finfo(torch.float8_e4m3fn).max
    packed = load_file(folder / "model.safetensors")
    plain = dict(packed)
    for name in [name for name in packed if name.endswith("proj.weight")]:
        rows, columns = packed[name].shape
        blocks = packed[name].view(rows // block, block, columns // block, block)
        scales = blocks.abs().amax((1, 3), keepdim=True) / largest
        numbers = (blocks / scales).to(torch.float8_e4m3fn)
        packed[name], packed[f"{name}_scale_inv"] = (
            numbers.view(rows, columns),
            scales[:, 0, :, 0].contiguous(),
        )
        plain[name] = (numbers.float() * scales).view(rows, columns)
    config = json.loads((folder / "config.json").read_text())
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {"quant_method": method, "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    return folder / "plain"


def test_weights_in_8_bit_floats_are_expanded_on_cpu(tmp_path: Path) -> None:
    plain = quantize(make_tiny_llama(tmp_path), "fp8")
    packed, expanded = Bench(load(tmp_path)), Bench(load(plain))
    for bench in packed, expanded:
        bench.generate({"p": [5, 9, 100, 7]}, SamplingParams(max_tokens=4, temperature=0.0))
    assert different(packed.runner.rows, expanded.runner.rows) == []


def test_weights_packed_in_an_unknown_way_are_refused(tmp_path: Path) -> None:
    """transformers would run on the packed numbers as if they were weights."""
    quantize(make_tiny_llama(tmp_path), "modelopt")
    with pytest.raises(ModelUnsupported, match=r"in a way that transformers does not know \(modelopt\)"):
        load(tmp_path)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}


@pytest.mark.parametrize("rope", [LONGROPE, {"full_attention": LONGROPE, "sliding_attention": {}}])
def test_the_context_ends_where_longrope_would_turn_all_over_again(rope: dict[str, object]) -> None:
    """A longer sequence changes the angles of its neighbours, and of keys in the cache."""
    assert context_length(LlamaConfig(max_position_embeddings=CONTEXT)) == CONTEXT
    config = LlamaConfig(max_position_embeddings=CONTEXT)
    config.rope_parameters = rope
    assert context_length(config) == 64


def test_a_model_without_a_head_for_words_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match=r"1 of its weights are missing, lm_head.weight"):
        load(tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "falcon", "gptj", "mpt", "gpt_oss"])
def test_the_context_length_is_found_under_each_of_its_names(model_type: str) -> None:
    overrides = {"max_seq_len": CONTEXT} if model_type == "mpt" else {}
    assert context_length(Architecture("", model_type, overrides).config()) == CONTEXT


@pytest.mark.parametrize(
    "architecture",
    [Architecture("llama", "llama"), Architecture("one more than it gives", "moshi", {"ffn_dim": 64})],
    ids=lambda a: a.name,
)
def test_the_vocabulary_is_what_can_be_taken_in_and_given_out(
    architecture: Architecture, tmp_path: Path
) -> None:
    assert vocabulary_size(load(architecture.make(tmp_path))) == VOCABULARY
