"""Structured output: which tokens may come next if the text is to follow a schema, pattern or grammar.

The library is llguidance. Tried beside xgrammar on one vocabulary of 49,152 tokens (one thread; 10 to
100 us a mask for both), it refuses the JSON schema keywords that it does not know, where xgrammar
passes over `uniqueItems`, `contains`, `not` and others and generates texts that do not validate; and it
is one wheel without dependencies that lets go of the GIL, where xgrammar wants torch, triton and
transformers.

A `GrammarCompiler` is made once, from the worker's tokenizer. Compiling a job's `StructuredOutputs`
(at admission, in any thread) gives a `CompiledGrammar`, and that starts one `Grammar` for each of the
job's choices. A grammar takes in one generated token after another, and computes what may follow in a
thread of its own while the model computes the logits to which it applies.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import llguidance
import numpy as np
from numpy.typing import NDArray

from tidemill.params import StructuredOutputs
from tidemill_worker.mask_thread import MaskThread
from tidemill_worker.structured_source import refused, to_lark
from tidemill_worker.structured_trial import LIMITS, GrammarTrial, one_line
from tidemill_worker.structured_vocabulary import TokenBytes, Vocabulary

CACHE_SIZE = 256
"""Grammars remembered as good or bad; a text of at most 64 KiB each."""


class Workshop:
    """What all grammars of one model share; it ends with the last of them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = vocabulary.for_matching()
        self.trial = GrammarTrial(vocabulary)
        self.masks = MaskThread()
        weakref.finalize(self, self.masks.close)


class Grammar:
    """What one generation may go on with. One thread at a time may use it.

    A token that the grammar does not allow, and a mask that exceeds the library's limits, make it
    fail: `error` says why, nothing is allowed any more, and the generation cannot be finished.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, workshop: Workshop, token_ids: Iterable[int] = ()
    ) -> None:
        self._matcher = matcher
        self._workshop = workshop
        self._lock = threading.Lock()  # the matcher's: held while a token is taken in or a mask computed
        self._ready = threading.Event()
        self._words = np.zeros(workshop.vocabulary.num_mask_words, np.uint32)
        self._mask = self._words[: (len(workshop.vocabulary.tokens) + 31) // 32]
        self.is_complete = False
        """Nothing but the end of text can follow: the generation is over, end of text or not."""
        self.error: str | None = None
        """Why no text can be finished any more."""
        for token_id in token_ids:
            self._take(token_id)
        workshop.masks.submit(self)

    def accept(self, token_id: int) -> None:
        """Take in a generated token; what may follow it is computed meanwhile in another thread.

        End of text completes the grammar where it may end, and is an error elsewhere.
        """
        with self._lock:
            self._ready.clear()
            self._take(token_id)
        self._workshop.masks.submit(self)

    def allowed_tokens(self) -> NDArray[np.uint32]:
        """Bit i of word i // 32 is set if token i may come next; waits until that is known.

        End of text is among them where the text may end. The array is this grammar's own, and good
        until the next `accept`.
        """
        self._workshop.masks.wait(self._ready)
        return self._mask

    def compute(self) -> None:
        """For the mask thread: what may follow the newest token, unless that is known."""
        with self._lock:
            if self._ready.is_set():
                return
            if self.error is None:
                self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
                self._check("no token of this model's vocabulary continues the text")
            self._ready.set()

    def fail(self, reason: str) -> None:
        """Allow nothing from now on; wakes whoever waits for the mask."""
        self.error = self.error or reason
        self._mask = np.zeros_like(self._mask)  # native code that is given up may still write to the old one
        self._ready.set()

    def _take(self, token_id: int) -> None:
        if self.error is not None:
            return
        self._matcher.consume_token(token_id)
        self._check(f"the grammar does not allow token {token_id} here")
        self.is_complete = self.error is None and self._matcher.is_stopped()

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            self.error = f"{what}: {one_line(self._matcher.get_error())}"
            self._words.fill(0)


@dataclass(frozen=True)
class CompiledGrammar:
    """What the text of one job must be; all its choices start from here.

    They share what the library finds out about patterns while it computes masks, and the limit on how
    much that may be. Jobs share nothing, so that none can use up another's limits.
    """

    matcher: llguidance.LLMatcher
    """Never moves itself."""
    workshop: Workshop

    def start(self, token_ids: Iterable[int] = ()) -> Grammar:
        """For one choice, behind `token_ids` that it has generated already."""
        return Grammar(self.matcher.deep_copy(), self.workshop, token_ids)


class GrammarCompiler:
    """Compiles what jobs ask of their text, for one model; any thread may ask.

    Nothing is made, and no other process started, before the first job that needs it.

    Args:
        tokenizer: the model's; read once.
        end_of_text: the tokens that end a text. If there are none, a text ends only where nothing can
            follow.
    """

    def __init__(self, tokenizer: TokenBytes, end_of_text: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._end_of_text = end_of_text
        self._lock = threading.Lock()
        self._workshop: Workshop | None = None
        self._refusals: OrderedDict[str, str | None] = OrderedDict()

    def compile(self, outputs: StructuredOutputs) -> CompiledGrammar:
        """Make the grammar of one job, without the GIL for the most part.

        Whether it can be used is found out once for all jobs that ask for the same; that takes tens
        of milliseconds, and everybody else's new grammars wait.

        Raises:
            InvalidJob: naming the field: if it cannot be compiled, no text or only the empty one
                satisfies it, or it takes more time or memory than a job may.
        """
        try:
            text = to_lark(outputs)
        except RecursionError as error:
            raise refused(outputs.kind, "it is nested too deeply") from error
        reason = self._refusal_of(text)
        if reason is not None:
            raise refused(outputs.kind, reason)
        workshop = self._opened()
        matcher = llguidance.LLMatcher(workshop.tokenizer, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RuntimeError(f"a grammar that was found to be good: {one_line(matcher.get_error())}")
        return CompiledGrammar(matcher, workshop)

    def close(self) -> None:
        """End the thread and the process that were started; grammars in use must not be waited for."""
        with self._lock:
            if self._workshop is not None:
                self._workshop.masks.close()
                self._workshop.trial.close()

    def _refusal_of(self, text: str) -> str | None:
        with self._lock:
            if text in self._refusals:
                self._refusals.move_to_end(text)
                return self._refusals[text]
        reason = self._opened().trial.refusal_of(text)
        with self._lock:
            self._refusals[text] = reason
            while len(self._refusals) > CACHE_SIZE:
                self._refusals.popitem(last=False)
        return reason

    def _opened(self) -> Workshop:
        with self._lock:
            if self._workshop is None:
                vocabulary = Vocabulary.of(self._tokenizer, self._end_of_text)
                self._workshop = Workshop(vocabulary)
            return self._workshop
