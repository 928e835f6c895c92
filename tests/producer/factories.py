"""Tokenizers and texts for the producer's tests."""

import functools

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ENGLISH = (
    "The mill stands by the tide. Its wheel turns twice a day, when the water comes and when it goes. "
    "Grain is carried in sacks, and flour is carried out. What the miller cannot grind today waits in "
    "the store until the next tide, so nothing is lost and nothing is ground twice.\n"
)


@functools.cache
def byte_level_bpe() -> Tokenizer:
    """As GPT-2, Llama 3 and SmolLM2 have: any character is some bytes, merged where English is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([ENGLISH], trainer)
    return tokenizer


@functools.cache
def metaspace_unigram() -> Tokenizer:
    """As Llama 2 and Gemma have: a space put before every text, NFKC, bytes for the unknown."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("e", -4.0), ("a", -4.0), ("▁tide", -5.0)]
    pieces += [(f"<0x{byte:02X}>", -10.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def make_text(sentences: int, *, paragraph: int = 5) -> str:
    """So many different sentences, a blank line after each `paragraph` of them."""
    parts = []
    for number in range(1, sentences + 1):
        parts.append(f"Sentence number {number} says that the tide of day {number} was high.")
        parts.append("\n\n" if number % paragraph == 0 else " ")
    return "".join(parts)
