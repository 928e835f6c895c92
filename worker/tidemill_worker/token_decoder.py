"""From generated tokens to characters, one token at a time, going on from a prompt."""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence

from tidemill_worker.token_pieces import TokenPieces


class TokenDecoder:
    """Puts the pieces of tokens together to whole characters; an unfinished one is held back.

    Bytes that are no UTF-8 become U+FFFD, one for each maximal part of a character, as Python and
    Rust have it; so what is shown never depends on how the bytes were cut into tokens.

    A character that the prompt began belongs to the output if the output finishes it, and to the
    prompt, as U+FFFD, if it does not.

    Args:
        pieces: what each token adds.
        hidden: tokens that leave no text.
        prompt: the tokens in front of the first one pushed; their end is enough (`end_of_prompt`)
            unless `prompt_text` is wanted.
    """

    def __init__(self, pieces: TokenPieces, hidden: Container[int], prompt: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._opening: list[int] | None = []
        self._unfinished = b""
        self.prompt_text = "".join(map(self.push, prompt))
        """Text of `prompt`; its last character is settled with the first text of the output."""
        self._unfinished, _ = self._utf8.getstate()

    def push(self, token_id: int) -> str:
        """Take one token, return the text that has become final."""
        piece = self._piece(token_id)
        text = self._utf8.decode(piece)
        return self._settled(piece, text) if self._unfinished else text

    def flush(self) -> str:
        """Return what is still held back; nothing is pushed afterwards."""
        text = self._utf8.decode(b"", final=True)
        return self._settled(b"", text) if self._unfinished else text

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        piece = self._pieces.piece(token_id)
        if self._opening is None or not piece:
            return piece
        self._opening.append(token_id)
        piece = self._pieces.opening(self._opening)
        if piece:
            self._opening = None
        return piece

    def _settled(self, piece: bytes, text: str) -> str:
        """Keep from the output what only says that the prompt's last character was left unfinished."""
        self._unfinished += piece
        if not text:
            return ""
        if not self._unfinished.startswith(text[0].encode()):
            self.prompt_text += text[0]
            text = text[1:]
        self._unfinished = b""
        return text


def end_of_prompt(token_ids: Sequence[int], pieces: TokenPieces, hidden: Container[int]) -> Sequence[int]:
    """The last tokens of a prompt, as many as the text behind it can depend on.

    Three that are seen: a character has at most three bytes before its last one.
    """
    start, seen = len(token_ids), 0
    while start and seen < 3:
        start -= 1
        if token_ids[start] not in hidden and pieces.piece(token_ids[start]):
            seen += 1
    return token_ids[start:]
