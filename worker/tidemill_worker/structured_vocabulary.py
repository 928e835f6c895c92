"""A model's vocabulary as the bytes that each token adds to the text: what grammars are matched against."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import llguidance


class TokenBytes(Protocol):
    """What is read of the worker's tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_tokens(self) -> Collection[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True)
class Vocabulary:
    """What all grammars of a model are matched against; can be sent to another process."""

    tokens: tuple[bytes, ...]
    """By token id, one for each id that the model can embed; empty where the tokenizer has no token."""
    special: frozenset[int]
    """Control tokens. They match no text, whatever they are called; those that end a text are among them."""
    end_of_text: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: TokenBytes, end_of_text: Collection[int]) -> Self:
        size = tokenizer.vocab_size
        ends = sorted(token_id for token_id in end_of_text if token_id < size)
        special = {token_id for token_id in tokenizer.special_tokens if token_id < size}
        return cls(
            tokens=tuple(tokenizer.token_bytes(token_id) for token_id in range(size)),
            special=frozenset(special.union(ends)),
            end_of_text=tuple(ends),
        )

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Inverse of `to_plain`."""
        tokens = tuple(token.encode("latin-1") for token in plain["tokens"])
        return cls(tokens, frozenset(plain["special"]), tuple(plain["end_of_text"]))

    def to_plain(self) -> dict[str, Any]:
        """The same as JSON can say it: each byte is the character of its number."""
        return {
            "tokens": [token.decode("latin-1") for token in self.tokens],
            "special": sorted(self.special),
            "end_of_text": list(self.end_of_text),
        }

    @property
    def num_mask_words(self) -> int:
        """Length of a mask that the library fills, in words of 32 tokens."""
        size = len(self.tokens) if self.end_of_text else len(self.tokens) + 1
        return (size + 31) // 32

    def for_matching(self) -> llguidance.LLTokenizer:
        """What the library matches with; made once, it serves all grammars and threads of a process."""
        return llguidance.LLTokenizer(
            _Matchable(self),  # type: ignore[arg-type]  # its own wrapper class insists on an encoder
            eos_token=list(self.end_of_text) or None,
            slices=llguidance.LLTokenizer.json_slices(),
        )


class _Matchable:
    """The attributes that the library reads off a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special)
        # If there is none, the library appends one of its own behind the vocabulary.
        self.eos_token_id = vocabulary.end_of_text[0] if vocabulary.end_of_text else None

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("needed only to force tokens, and our grammars do not")
