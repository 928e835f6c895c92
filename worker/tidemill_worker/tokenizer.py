"""From a job's input to token ids, and back: chat template, encoding, text of output.

All methods may be called from several threads at once. They share one Rust tokenizer, which is
only ever read: transformers' own call changes its truncation and padding each time, and that is
what fails with "Already borrowed" (vllm#40949).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.errors import ErrorCode, InvalidJob, ModelUnsupported
from tidemill.jobs import Job, Message
from tidemill.params import SamplingParams
from tidemill_worker.output_text import StoppedText
from tidemill_worker.token_decoder import TokenDecoder, end_of_prompt
from tidemill_worker.token_pieces import token_pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

Render = Callable[[Sequence[Message]], str]


class Tokenizer:
    """What the worker needs of one model's tokenizer.

    Args:
        backend: the Rust tokenizer; owned by this object from now on.
        render: the chat template, with the assistant's turn opened; `None` if there is none.
        vocab_size: number of token ids that the model can embed.

    Raises:
        ModelUnsupported: if its output could not be decoded token by token.
    """

    def __init__(
        self, backend: RustTokenizer, *, render: Render | None = None, vocab_size: int | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._render = render
        self.vocab_size = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        """Control tokens; `skip_special_tokens` leaves them out of the text."""
        self._first_tokens = _first_tokens(backend)
        self._pieces = token_pieces(backend)
        self.token_text = lru_cache(maxsize=None)(self._token_text)

    @classmethod
    def from_pretrained(cls, folder: Path | str, *, vocab_size: int | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder; nothing is fetched, no remote code is run.

        Raises:
            ModelUnsupported: if it has none, or only one in Python.
        """
        from transformers import AutoTokenizer

        from tidemill_worker.chat_template import chat_renderer

        try:
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever its files make the many loaders behind this raise
            raise ModelUnsupported(f"{folder}: {_why_not_loaded(Path(folder), error)}") from error
        if not loaded.is_fast:
            raise ModelUnsupported(
                f"{folder}: its tokenizer is one in Python; only those with a tokenizer.json are supported"
            )
        try:
            return cls(loaded.backend_tokenizer, render=chat_renderer(loaded), vocab_size=vocab_size)
        except ModelUnsupported as error:
            raise ModelUnsupported(f"{folder}: {error}") from error

    def prompt_token_ids(self, job: Job, *, capacity: int | None = None) -> list[int]:
        """Token ids of whichever input the job has, cut to `params.truncate_prompt_tokens`.

        Special tokens that are spelled out are recognised, in a prompt as in messages: messages and
        the text that the template makes of them are the same tokens. Text from strangers may
        therefore end its turn with the model's control tokens; who passes it on has to remove them.

        What is cut off is cut off at the beginning, whatever it is: BOS and the system's turn too.

        Args:
            job: what to take the input and the params from.
            capacity: tokens that prompt and output may have together; without it, nothing is cut
                for -1, and no number is too large.

        Raises:
            InvalidJob: naming the field: no chat template, tokens that the model does not have, no
                tokens, more to be kept than there is room for beside `params.max_tokens`.
        """
        if job.prompt_token_ids is not None:
            token_ids = self._checked(job.prompt_token_ids)
        elif job.messages is not None:
            token_ids = self._encode(self._rendered(job.messages), field="messages")
        else:
            token_ids = self._encode(job.prompt or "", field="prompt")
        return _truncated(token_ids, job.params, capacity)

    def output_text(self, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> StoppedText:
        """A fresh text side for one generation that goes on from this prompt.

        The text is what the prompt and the output make together, without the prompt's unless
        `params.echo`: where it continues a text, its first token keeps the space that SentencePiece
        drops at a text's beginning.
        """
        hidden = self.special_tokens if params.skip_special_tokens else frozenset[int]()
        prompt = prompt_token_ids if params.echo else end_of_prompt(prompt_token_ids, self._pieces, hidden)
        return StoppedText(TokenDecoder(self._pieces, hidden, prompt), params)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell `words`: each as it begins a text, and behind a space.

        vLLM's two spellings. It takes the second only if it is as long as the first; here it counts
        unless it ends with the first, which then forbids it already: else a word of one token behind
        a space and of several without would be free to come. Tokens that the model does not have need
        not be forbidden.

        Raises:
            InvalidJob: naming the word that is no tokens at all.
        """
        spellings = (ids for index, word in enumerate(words) for ids in self._spellings(index, word))
        return tuple(ids for ids in spellings if max(ids) < self.vocab_size)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that has begun; special ones are spelled out.

        Ids that only the model has are nothing.
        """
        return self._pieces.piece(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` by themselves, without special tokens."""
        decoder = TokenDecoder(self._pieces, self.special_tokens)
        return "".join(map(decoder.push, token_ids)) + decoder.flush()

    @property
    def chat_template_overhead(self) -> int:
        """Tokens that the template puts around one user message; 0 without a template.

        Also 0 if the template refuses an empty message: then nobody can tell.
        """
        try:
            return len(self._encode(self._rendered([Message(role="user", content="")]), field="messages"))
        except InvalidJob:
            return 0

    def to_json(self) -> str:
        """The tokenizer.json of this tokenizer."""
        return str(self._backend.to_str())

    def _rendered(self, messages: Sequence[Message]) -> str:
        if self._render is None:
            raise InvalidJob("messages: this model has no chat template; send a prompt", field="messages")
        try:
            return self._render(messages)
        except Exception as error:  # a template is a program, and may fail as any other
            raise InvalidJob(
                f"messages: the model's chat template refuses them: {error}", field="messages"
            ) from error

    def _encode(self, text: str, *, field: str) -> list[int]:
        """Ids that begin as the tokenizer has it (with BOS, as a rule), once.

        `text` may bring that beginning itself. What a tokenizer would put at the end is left out: the
        text goes on.
        """
        ids = self._known(text, field=field)
        if ids[: len(self._first_tokens)] != self._first_tokens:
            ids = self._first_tokens + ids
        if not ids:
            raise InvalidJob(f"{field}: it has no tokens", field=field, limit=1)
        if max(ids) >= self.vocab_size:
            token = self._backend.id_to_token(max(ids))
            raise InvalidJob(
                f"{field}: the tokenizer has {token!r}, the model has only {self.vocab_size} tokens",
                field=field,
                limit=self.vocab_size,
            )
        return ids

    def _known(self, text: str, *, field: str) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library's, of no class of its own
            raise InvalidJob(f"{field}: the tokenizer cannot encode it: {error}", field=field) from error

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

    def _spellings(self, index: int, word: str) -> list[tuple[int, ...]]:
        field = f"params.bad_words.{index}"
        bare, behind_space = (
            tuple(self._known(text, field=field)) for text in (word.lstrip(), f" {word.lstrip()}")
        )
        if not bare:
            raise InvalidJob(f"{field}: {word!r} has no tokens", field=field)
        return [bare] if behind_space[-len(bare) :] == bare else [bare, behind_space]

    def _token_text(self, token_id: int) -> tuple[str, tuple[int, ...] | None]:
        piece = self._pieces.piece(token_id)
        try:
            return piece.decode(), None
        except UnicodeDecodeError:
            return piece.decode(errors="replace"), tuple(piece)


def _why_not_loaded(folder: Path, error: Exception) -> str:
    """One line; the libraries behind the loader blame each other at length."""
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        return (
            f"its tokenizer.model cannot be converted: {' '.join(str(error).split())};"
            " save a tokenizer.json beside it"
        )
    return "its tokenizer cannot be loaded: " + " ".join(str(error).split())


def _first_tokens(backend: RustTokenizer) -> list[int]:
    """What the tokenizer puts in front of any text; seen at the first text that it can encode."""
    added = backend.get_added_tokens_decoder().values()
    for text in (*(token.content for token in added), *backend.get_vocab()):
        with suppress(Exception):  # what the library raises for a word without a token; try another
            encoding = backend.encode(text, add_special_tokens=True)
            return encoding.ids[: encoding.special_tokens_mask.index(0)]
    return []


def _truncated(token_ids: list[int], params: SamplingParams, capacity: int | None) -> list[int]:
    """The last `params.truncate_prompt_tokens` of them, or as many as leave room for the output."""
    kept = params.truncate_prompt_tokens
    if kept is None or (kept < 0 and capacity is None):
        return token_ids
    if capacity is not None:
        room = capacity - params.max_tokens
        if kept > room > 0:
            field = "params.truncate_prompt_tokens"
            raise InvalidJob(
                f"{field}: {kept} tokens and {params.max_tokens} of output exceed the {capacity} tokens that"
                f" a job may have; at most {room} can be kept",
                field=field,
                limit=room,
                code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            )
        kept = room if kept < 0 else min(kept, room)
    return token_ids[-max(1, kept) :]  # without any room, `params.max_tokens` is what will be refused
