"""From a job's input to token ids, and back: chat template, encoding, decoders for output.

All methods may be called from several threads at once. They share one Rust tokenizer, which is
only ever read: transformers' own call changes its truncation and padding each time, and that is
what fails with "Already borrowed" (vllm#40949).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.errors import InvalidJob, ModelUnsupported
from tidemill.jobs import Job, Message
from tidemill_worker.output_text import ByteLevelDecoder, StoppedText, TokenDecoder, WindowDecoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

Render = Callable[[Sequence[Message]], str]


class Tokenizer:
    """What the worker needs of one model's tokenizer.

    Args:
        backend: the Rust tokenizer; owned by this object from now on.
        render: the chat template, with the assistant's turn opened; `None` if there is none.
        bos_token_id: the token a sequence begins with, if the model knows one.
        vocab_size: number of token ids that the model can embed.
    """

    def __init__(
        self,
        backend: RustTokenizer,
        *,
        render: Render | None = None,
        bos_token_id: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._render = render
        self._bos_token_id = bos_token_id
        self.vocab_size = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        begun = backend.encode("", add_special_tokens=True).ids
        self._adds_bos = bos_token_id is not None and begun[:1] == [bos_token_id]
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._byte_level = _is_byte_level(json.loads(backend.to_str())["decoder"])
        self._token_bytes = lru_cache(maxsize=None)(partial(_token_bytes, backend, _byte_alphabet()))

    @classmethod
    def from_pretrained(cls, folder: Path | str, *, vocab_size: int | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder; nothing is fetched, no remote code is run.

        Raises:
            ModelUnsupported: if it has none, or only one in Python.
        """
        from transformers import AutoTokenizer

        try:
            loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelUnsupported(f"{folder}: its tokenizer cannot be loaded: {error}") from error
        if not loaded.is_fast:
            raise ModelUnsupported(f"{folder}: only tokenizers with a tokenizer.json are supported")

        def render(messages: Sequence[Message]) -> str:
            turns = [message.model_dump() for message in messages]
            return str(loaded.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

        return cls(
            loaded.backend_tokenizer,
            render=render if loaded.chat_template else None,
            bos_token_id=loaded.bos_token_id,
            vocab_size=vocab_size,
        )

    def prompt_token_ids(self, job: Job) -> list[int]:
        """Token ids of whichever input the job has.

        Raises:
            InvalidJob: naming the field: no chat template, ids outside the vocabulary, no tokens.
        """
        if job.prompt_token_ids is not None:
            return self._checked(job.prompt_token_ids)
        if job.messages is not None:
            return self._encode(self._rendered(job.messages), field="messages")
        return self._encode(job.prompt or "", field="prompt")

    def output_text(self, stop: Iterable[str] = ()) -> StoppedText:
        """A fresh text side for one generation."""
        return StoppedText(self._decoder(), stop)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    @property
    def chat_template_overhead(self) -> int:
        """Tokens that the template puts around one user message; 0 without a template."""
        if self._render is None:
            return 0
        return len(self._encode(self._render([Message(role="user", content="")]), field="messages"))

    def to_json(self) -> str:
        """The tokenizer.json of this tokenizer."""
        return str(self._backend.to_str())

    def _rendered(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        if self._render is None:
            raise InvalidJob("messages: this model has no chat template; send a prompt", field="messages")
        try:
            return self._render(messages)
        except TemplateError as error:
            raise InvalidJob(
                f"messages: the model's chat template refuses them: {error}", field="messages"
            ) from error

    def _encode(self, text: str, *, field: str) -> list[int]:
        """Ids with exactly one BOS if the tokenizer puts one, whether or not `text` brings its own."""
        ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        if self._adds_bos and ids[:1] != [self._bos_token_id]:
            ids.insert(0, self._bos_token_id)  # type: ignore[arg-type]
        if not ids:
            raise InvalidJob(f"{field}: it has no tokens", field=field, limit=1)
        return ids

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidJob(
                    f"prompt_token_ids.{position}: {token_id} is not in the vocabulary"
                    f" of {self.vocab_size} tokens",
                    field=f"prompt_token_ids.{position}",
                    limit=self.vocab_size,
                )
        return list(token_ids)

    def _decoder(self) -> TokenDecoder:
        if self._byte_level:
            return ByteLevelDecoder(self._visible_bytes)
        return WindowDecoder(self.decode, self._is_hidden, self._is_byte)

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special else self._token_bytes(token_id)

    def _is_hidden(self, token_id: int) -> bool:
        return token_id in self._special or self._backend.id_to_token(token_id) is None

    def _is_byte(self, token_id: int) -> bool:
        return BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _token_bytes(backend: RustTokenizer, alphabet: dict[str, int], token_id: int) -> bytes:
    """The bytes that the ByteLevel decoder makes of one token.

    Added tokens may be spelled in characters outside the alphabet; those stand for themselves.
    """
    token = backend.id_to_token(token_id) or ""
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the others are moved up from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(moved)
    }
