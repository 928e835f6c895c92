"""The model card: what the workers of a queue serve, published for those who fill it."""

from __future__ import annotations

import zlib

from pydantic import Field

from tidemill.schema import Wire


class ModelCard(Wire):
    """What a producer must know to size its prompts without loading the model.

    A card expires soon after its last publication, so that a queue nobody serves has none.
    """

    model: str
    """The name jobs may use for it."""
    max_model_len: int = Field(ge=1)
    """Context length: prompt and generated tokens together."""
    max_total_tokens: int = Field(ge=1)
    """Tokens that fit the worker's KV cache: the limit of any one job beside `max_model_len`."""
    chat_template_overhead: int = Field(default=0, ge=0)
    """Tokens that the chat template adds to one user message."""
    fingerprint: str = ""
    """Changes whenever the same job might be answered with other bits."""
    tokenizer_zlib: bytes = Field(default=b"", exclude=True)
    """`tokenizer.json`, compressed; kept beside the card's JSON, not in it."""

    @property
    def tokenizer_json(self) -> bytes | None:
        """What `tokenizers.Tokenizer.from_buffer` takes; `None` if the worker published none."""
        return zlib.decompress(self.tokenizer_zlib) if self.tokenizer_zlib else None

    @staticmethod
    def compress(tokenizer_json: bytes) -> bytes:
        """Prepare a `tokenizer.json` for `tokenizer_zlib`."""
        return zlib.compress(tokenizer_json, level=9)
