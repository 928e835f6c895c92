"""Tokenizers as models bring them: which folders load, and what is said of those that do not."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import decoders

from tests.worker.factories import TRAINING_TEXT
from tests.worker.tiny_tokenizers import BOS, EOS, KINDS, make_backend, trained, write_tokenizer
from tidemill.errors import InvalidJob, ModelUnsupported
from tidemill.jobs import Job, Message
from tidemill.params import SamplingParams
from tidemill_worker.tokenizer import Tokenizer

TEXT = "The tide 🌊 isn't ď<|im_end|>  tidal<tool> [INST] a"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelUnsupported) as caught:
        Tokenizer.from_pretrained(folder)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    return message.removeprefix(str(folder))


def as_llama(folder: Path, kind: str, **config: Any) -> Path:
    """With the names of control tokens, and a config.json that says what model it is for."""
    write_tokenizer(folder, kind, bos_token=BOS, eos_token=EOS, **config)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    loaded = Tokenizer.from_pretrained(write_tokenizer(tmp_path, kind))
    made = Tokenizer(make_backend(kind))
    ids = made.prompt_token_ids(Job(prompt=TEXT))
    assert loaded.prompt_token_ids(Job(prompt=TEXT)) == ids
    assert loaded.special_tokens == made.special_tokens
    texts = [t.output_text(SamplingParams(echo=True), ids).close() for t in (loaded, made)]
    assert texts == [make_backend(kind).decode(ids)] * 2


@pytest.mark.parametrize(
    "tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"]
)
@pytest.mark.parametrize("kind", ["llama2", "llama3", "mistral"])
def test_ids_and_text_are_those_of_transformers(kind: str, tokenizer_class: str, tmp_path: Path) -> None:
    """Its classes may rebuild what tokenizer.json says; the model is used with what they make of it."""
    from transformers import AutoTokenizer

    folder = as_llama(tmp_path, kind, tokenizer_class=tokenizer_class)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_pretrained(folder)
    ids = ours.prompt_token_ids(Job(prompt=TEXT))
    assert ids == theirs(TEXT).input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["llama2", "llama3"])
def test_a_chat_template_is_found_and_rendered_as_transformers_does(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = as_llama(tmp_path, kind, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "Why, ďábel? 🌊"}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
    ids = Tokenizer.from_pretrained(folder).prompt_token_ids(Job.parse({"messages": messages}))
    assert ids == expected["input_ids"]


def test_a_chat_template_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    folder = as_llama(tmp_path, "llama3")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.chat_template_overhead > 0
    with pytest.raises(InvalidJob, match="no system role"):
        tokenizer.prompt_token_ids(Job(messages=(Message(role="system", content="x"),)))


def test_of_several_chat_templates_the_default_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "never"}]
    tokenizer = Tokenizer.from_pretrained(as_llama(tmp_path, "llama3", chat_template=templates))
    assert tokenizer.chat_template_overhead > 0


@pytest.mark.parametrize("templates", [None, [{"name": "tool_use", "template": "never"}]])
def test_without_a_chat_template_messages_are_refused(templates: Any, tmp_path: Path) -> None:
    config = {} if templates is None else {"chat_template": templates}
    tokenizer = Tokenizer.from_pretrained(as_llama(tmp_path, "llama3", **config))
    with pytest.raises(InvalidJob, match="no chat template"):
        tokenizer.prompt_token_ids(Job(messages=(Message(role="user", content="x"),)))


def test_tokens_added_in_the_config_are_recognised(tmp_path: Path) -> None:
    size = make_backend("llama3").get_vocab_size()
    flags = dict.fromkeys(["lstrip", "rstrip", "single_word", "normalized"], False)
    added = {str(size): {"content": "<|own|>", "special": True, **flags}}
    folder = as_llama(tmp_path, "llama3", added_tokens_decoder=added)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert size in tokenizer.special_tokens
    assert tokenizer.prompt_token_ids(Job(prompt="a<|own|>"))[-1] == size


def test_vocabulary_and_merges_without_a_tokenizer_json_load(tmp_path: Path) -> None:
    model = json.loads(trained("gpt2"))["model"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    expected = Tokenizer(make_backend("gpt2")).prompt_token_ids(Job(prompt=TEXT))
    assert tokenizer.prompt_token_ids(Job(prompt=TEXT)) == expected


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    assert "tokenizer cannot be loaded" in refusal(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path, "gpt2") / "tokenizer.json").write_text("{")
    assert "tokenizer cannot be loaded" in refusal(tmp_path)


def test_a_sentencepiece_model_alone_is_converted(tmp_path: Path) -> None:
    """The tokens and the text are those of the library that wrote the file."""
    trained = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING_TEXT),
        model_writer=trained,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",  # as Llama's
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(trained.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    original = SentencePieceProcessor(model_proto=trained.getvalue())
    for text in (TEXT, "The mill", "naïve 🌊 žluťoučký"):
        token_ids = original.encode(text)
        assert tokenizer.prompt_token_ids(Job(prompt=text)) == [original.bos_id(), *token_ids]
        assert tokenizer.decode(token_ids) == original.decode(token_ids)


def test_a_damaged_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    assert "its tokenizer.model cannot be converted" in refusal(tmp_path)


def test_a_tokenizer_in_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    assert "is one in Python" in refusal(tmp_path)


def test_remote_code_is_refused_and_not_run(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    assert "custom code" in refusal(tmp_path)
    assert not (tmp_path / "was_run").exists()


def test_a_decoder_that_cannot_be_followed_is_refused_with_its_folder(tmp_path: Path) -> None:
    backend = make_backend("gpt2")
    backend.decoder = decoders.BPEDecoder()
    (write_tokenizer(tmp_path, "gpt2") / "tokenizer.json").write_text(backend.to_str())
    assert refusal(tmp_path).endswith("cannot be followed token by token: BPEDecoder")
