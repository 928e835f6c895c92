"""Small tokenizers of the kinds that models come with, trained here, and folders that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as RustTokenizer

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = (
    "The tide turns the mill, and the mill grinds the corn. The corn is good, isn't it?",
    "Žluťoučký kůň úpěl ďábelské ódy. Ďábel! 水車は潮で回る。 🌊🌊 naïve café  déjà-vu",
    "def step(self):\n    plan = self.schedule()\n    return self.run(plan)\n\n",
    "[INST] Why does the tide turn? [/INST] Because of the moon, they say.",
)


def _bpe(backend: RustTokenizer, special: Sequence[str], **trainer: Any) -> RustTokenizer:
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(special_tokens=list(special), show_progress=False, **trainer)
    )
    return backend


def _added(backend: RustTokenizer) -> RustTokenizer:
    """Tokens of a model's own: control tokens and ordinary ones, with all that can be said of them."""
    backend.add_special_tokens(["<|im_start|>", AddedToken("<|im_end|>", rstrip=True)])
    backend.add_tokens(
        [
            AddedToken("<tool>", lstrip=True),
            AddedToken("tidal", single_word=True),
            AddedToken("    ", normalized=False),
        ]
    )
    return backend


def _begins_with_bos(backend: RustTokenizer, *others: Any) -> RustTokenizer:
    bos = backend.token_to_id(BOS)
    template = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    backend.post_processor = processors.Sequence([*others, template]) if others else template
    return backend


def gpt2() -> RustTokenizer:
    """Byte-level, one token for the end of everything, nothing put in front."""
    backend = RustTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return _bpe(
        backend,
        ["<|endoftext|>"],
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )


def llama3() -> RustTokenizer:
    """Byte-level behind a regular expression; BOS; control tokens in plenty."""
    backend = RustTokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _bpe(backend, [BOS, EOS], vocab_size=420, initial_alphabet=alphabet)
    return _begins_with_bos(_added(backend), processors.ByteLevel(trim_offsets=False))


def _with_byte_tokens(backend: RustTokenizer) -> RustTokenizer:
    """A trained BPE model again, with a token for each byte, as SentencePiece orders them."""
    trained = json.loads(backend.to_str())["model"]
    special = [UNK, BOS, EOS]
    words = [token for token in trained["vocab"] if token not in special]
    vocab = {token: index for index, token in enumerate([*special, *BYTES, *words])}
    backend.model = models.BPE(
        vocab=vocab,
        merges=[tuple(merge) for merge in trained["merges"]],
        unk_token=UNK,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend.add_special_tokens(special)
    return backend


def _sentencepiece_bpe(backend: RustTokenizer) -> RustTokenizer:
    return _added(_with_byte_tokens(_bpe(backend, [UNK, BOS, EOS], vocab_size=180, limit_alphabet=60)))


def llama2() -> RustTokenizer:
    """SentencePiece's BPE in its first conversion: a space is put in front by a normalizer."""
    backend = RustTokenizer(models.BPE(unk_token=UNK, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _begins_with_bos(_sentencepiece_bpe(backend))


def mistral() -> RustTokenizer:
    """The same in its second conversion: a pre-tokenizer marks spaces, the first one included."""
    backend = RustTokenizer(models.BPE(unk_token=UNK, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _begins_with_bos(_sentencepiece_bpe(backend))


def gemma() -> RustTokenizer:
    """SentencePiece's BPE without a space in front: nothing is stripped."""
    backend = RustTokenizer(models.BPE(unk_token=UNK, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _begins_with_bos(_sentencepiece_bpe(backend))


def unigram() -> RustTokenizer:
    """SentencePiece's Unigram, normalized; puts its end token behind each text."""
    backend = RustTokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=[UNK, BOS, EOS], unk_token=UNK, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, 2)])
    return _added(backend)


def wordpiece() -> RustTokenizer:
    """BERT's: words and their continuations, one token around each end."""
    backend = RustTokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return _added(backend)


def wordlevel() -> RustTokenizer:
    """Whole words and no decoder: spaces between all tokens."""
    backend = RustTokenizer(models.WordLevel(unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=[UNK, BOS, EOS], show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


KINDS: dict[str, Callable[[], RustTokenizer]] = {
    make.__name__: make for make in (gpt2, llama3, llama2, mistral, gemma, unigram, wordpiece, wordlevel)
}
BYTE_FALLBACK = ("llama2", "mistral", "gemma")


@cache
def trained(kind: str) -> str:
    """The tokenizer.json of a kind."""
    return KINDS[kind]().to_str()


def make_backend(kind: str) -> RustTokenizer:
    """A tokenizer of this kind that nobody else has."""
    return RustTokenizer.from_str(trained(kind))


def write_tokenizer(folder: Path, kind: str, **config: Any) -> Path:
    """A model folder with this tokenizer, as it would be downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(trained(kind), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
