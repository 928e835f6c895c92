from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForSequenceClassification

from tests.worker.model.agreement import assert_agrees
from tests.worker.model.architectures import CONTEXT, VOCABULARY, Architecture
from tests.worker.model.factories import CPU, Bench, load, make_tiny_llama
from tidemill.errors import ModelUnsupported
from tidemill.params import SamplingParams
from tidemill_worker.model.architecture import context_length, vocabulary_size
from tidemill_worker.model.loader import end_of_text_tokens, load_model, stored_dtype


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
    assert stored_dtype(tmp_path / "half") == dtype
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


def test_the_vocabulary_is_what_can_be_looked_up(tmp_path: Path) -> None:
    model = load(make_tiny_llama(tmp_path))
    assert vocabulary_size(model) == VOCABULARY
