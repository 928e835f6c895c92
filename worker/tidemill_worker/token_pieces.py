"""What each token of a vocabulary adds to a text, in bytes.

A token need not be whole characters: byte-level vocabularies cut UTF-8 anywhere, those of
SentencePiece fall back to one token for each byte. In bytes, the text of a sequence is the sum of
what its tokens add; only the first ones may add less than they do elsewhere (a space).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from tidemill.errors import ModelUnsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

PIECEWISE = re.compile(r"((Replace|Metaspace|WordPiece|Strip) )*(ByteFallback )?(Fuse )?((?<=Fuse )Strip )?")
"""Decoders that treat each token by itself but for the text's beginning, in the order they may have."""


class TokenPieces(Protocol):
    """A vocabulary as bytes of text; special tokens are spelled out, unknown ids are nothing."""

    def piece(self, token_id: int) -> bytes:
        """What the token adds behind other text."""
        ...

    def opening(self, token_ids: Sequence[int]) -> bytes:
        """What the last of a text's first tokens adds, those before it having added nothing."""
        ...


def token_pieces(backend: RustTokenizer) -> TokenPieces:
    """The pieces that `backend`'s decoder makes of its vocabulary.

    Raises:
        ModelUnsupported: if that decoder does more than put pieces together.
    """
    steps = _steps(json.loads(backend.to_str())["decoder"])
    names = "".join(f"{_name(step)} " for step in steps)
    if names in {"ByteLevel ", "ByteLevel Fuse "}:
        return ByteLevelPieces(backend)
    if PIECEWISE.fullmatch(names):
        return DecodedPieces(backend, byte_fallback="ByteFallback" in names)
    raise ModelUnsupported(f"its tokenizer's decoder cannot be followed token by token: {names.strip()}")


class ByteLevelPieces:
    """GPT-2's kind, and Llama 3's: the characters of a token stand for bytes."""

    def __init__(self, backend: RustTokenizer) -> None:
        self._backend = backend
        self._alphabet = _byte_alphabet()
        self.piece = lru_cache(maxsize=None)(self._piece)

    def opening(self, token_ids: Sequence[int]) -> bytes:
        return self.piece(token_ids[-1])

    def _piece(self, token_id: int) -> bytes:
        """Added tokens may be spelled in characters outside the alphabet; those stand for themselves."""
        token = self._backend.id_to_token(token_id) or ""
        if all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        return token.encode()


class DecodedPieces:
    """Every other kind: the tokenizer's own decoder is asked, with another token in front.

    Byte tokens (`<0xE2>`) are taken as what they say. The tokenizer's decoder replaces a whole run
    of them if one is out of place, so that no character could be shown before the run has ended, nor
    a stop string be found in it; the bytes by themselves say the same of every run that is valid.
    """

    def __init__(self, backend: RustTokenizer, *, byte_fallback: bool) -> None:
        self._backend = backend
        self._byte_values = _byte_values(backend) if byte_fallback else {}
        self._other = self._any_text()
        self._other_size = len(self._decode([self._other]))
        self.piece = lru_cache(maxsize=None)(self._piece)

    def opening(self, token_ids: Sequence[int]) -> bytes:
        byte = self._byte_values.get(token_ids[-1], 0)
        return self._decode(token_ids).encode() if byte < 0x80 else bytes([byte])

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._byte_values:
            return bytes([self._byte_values[token_id]])
        return self._decode([self._other, token_id])[self._other_size :].encode()

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def _any_text(self) -> int:
        """A token that is text of its own."""
        for token_id in range(self._backend.get_vocab_size(with_added_tokens=True)):
            if self._byte_values.get(token_id, 0) < 0x80 and self._decode([token_id]).strip():
                return token_id
        raise ModelUnsupported("its tokenizer has no token that is text")


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _name(step: dict[str, Any]) -> str:
    if step["type"] == "Strip" and (step["start"], step["stop"]) != (1, 0):
        return f"Strip({step['start']}, {step['stop']})"
    return str(step["type"])


def _byte_values(backend: RustTokenizer) -> dict[int, int]:
    matches = ((BYTE_TOKEN.fullmatch(token), token_id) for token, token_id in backend.get_vocab().items())
    return {token_id: int(match[1], 16) for match, token_id in matches if match}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the others are moved up from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(moved)
    }
