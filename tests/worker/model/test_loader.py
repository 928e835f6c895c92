from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.worker.model.factories import CPU, load, make_tiny_llama
from tidemill.errors import ModelUnsupported
from tidemill_worker.model.loader import end_of_text_tokens, load_model


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16)).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="architecture 'gpt2' is not served yet; served are: llama"):
        load(tmp_path)


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
