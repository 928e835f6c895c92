"""A model for what is not about the model: loads and steps in no time, and is always the same."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

BOS, EOS = "<s>", "</s>"
VOCAB_SIZE = 400
TEXT = (
    "The tide turns the mill, and the mill grinds the corn. The corn is good, isn't it?",
    "Once a miller lived by the sea, where the water went out twice a day and came back twice.",
    "Žluťoučký kůň úpěl ďábelské ódy. 水車は潮で回る。 naïve café",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_tiny_model(folder: Path, *, seed: int = 0, context: int = 2048) -> Path:
    """Write a random Llama of some 100,000 weights with a tokenizer trained on a few lines.

    Args:
        folder: made if need be.
        seed: another one makes another model, with another fingerprint.
        context: its context length, in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        initializer_range=0.2,  # lively enough for every position to matter
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _tokenizer() -> Tokenizer:
    """Byte-level BPE, the kind of GPT-2 and Llama 3."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend
