"""What is tried on every model before it is served: that our way of running it changes nothing.

Prompts are taken whole, in chunks and beside another sequence, over a small paged cache, and compared
with transformers' own eager forward. A model that keeps a state between tokens elsewhere than in its
attention, or mixes neighbours, goes wrong there, and is refused instead of being silently wrong later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from transformers import PreTrainedModel

from tidemill.errors import ModelUnsupported
from tidemill.params import SamplingParams
from tidemill_scheduler.plan import Row, StepPlan
from tidemill_scheduler.sequence import BlockId, SequenceId
from tidemill_worker.model.architecture import vocabulary_size
from tidemill_worker.model.batch import Generations, PagedBatch, build_batch
from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.model.masks import attention_implementation
from tidemill_worker.model.prompt_logprobs import body_runs_once
from tidemill_worker.model.survey import AttentionLayer

BLOCK_SIZE = 8
PROMPT_TOKENS = 26
CHUNKS = (20, 5, 1)
"""The last are short, so that what a state-space or convolution layer has lost shows in the result."""
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Root mean square of the differences, in standard deviations of the logits. Noise of float32 is some
1e-6; in half types it is a hundredth, and more where it sends a token to another expert. Zeroed
attention, mixed up neighbours or a lost state change logits by a large part of their own size.
"""

SUBJECT, NEIGHBOUR = SequenceId(0), SequenceId(1)


@dataclass(frozen=True)
class Prompt:
    """What `build_batch` needs to know of a sequence."""

    token_ids: Sequence[int]
    params: SamplingParams

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)


def probe(model: PreTrainedModel, layers: Sequence[AttentionLayer]) -> None:
    """Compare the ways to run `model` with each other and with transformers' eager forward.

    `layers` are what `survey` found.

    Raises:
        ModelUnsupported: with the way that changed its logits.
    """
    trial = Trial(model, layers)
    expected = trial.eager()
    for way, found, question in (
        ("a prompt taken whole", trial.whole(), "does its attention see other keys than those before it"),
        ("a prompt taken in chunks", trial.chunked(), "does it keep a state outside of its attention"),
        ("two sequences in one batch", trial.packed(), "does it mix the sequences of a batch"),
    ):
        difference = relative_difference(found, expected[-len(found) :])
        if not difference <= TOLERANCES[model.dtype]:
            raise ModelUnsupported(
                f"model: with {way} its logits differ from transformers' own by {difference:.1e} of"
                f" their standard deviation; {question}?"
            )


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference of logits, in their standard deviations."""
    return float((found - expected).square().mean().sqrt() / expected.std())


class Trial:
    """A cache with room for two prompts, and the ways to run one of them; all return logits of its
    last rows, `[rows, vocabulary]`, float32.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[AttentionLayer]) -> None:
        self._model = model
        self._num_blocks = -(-PROMPT_TOKENS // BLOCK_SIZE)
        self._prompts = {SUBJECT: _prompt(model, 1), NEIGHBOUR: _prompt(model, 2)}
        spec = KVCacheSpec.for_layers(layers, block_size=BLOCK_SIZE, dtype=model.dtype)
        self._kv_cache = spec.allocate(2 * self._num_blocks, model.device)
        self._ends = torch.tensor(CHUNKS, device=model.device).cumsum(0) - 1

    def eager(self) -> torch.Tensor:
        """As transformers does it, at the end of each chunk."""
        tokens = torch.tensor([self._prompts[SUBJECT].token_ids], device=self._model.device)
        with torch.inference_mode(), attention_implementation(self._model, "eager"):
            logits = self._model(input_ids=tokens, use_cache=False, logits_to_keep=self._ends).logits
        return cast(torch.Tensor, logits)[0].float()

    def whole(self) -> torch.Tensor:
        """The head runs twice over what the body computes once, as for the logprobs of a prompt."""
        batch = self._batch(self._row(SUBJECT, 0, PROMPT_TOKENS))
        with torch.inference_mode(), body_runs_once(self._model):
            _logits(self._model, replace(batch, sampled_rows=self._ends[:1]))
            return _logits(self._model, replace(batch, sampled_rows=self._ends))

    def chunked(self) -> torch.Tensor:
        logits, start = [], 0
        for count in CHUNKS:
            logits.append(self._run(self._row(SUBJECT, start, count)))
            start += count
        return torch.cat(logits)

    def packed(self) -> torch.Tensor:
        """The neighbour stands in front, and its prompt is in its first chunk."""
        return self._run(self._row(NEIGHBOUR, 0, CHUNKS[0]), self._row(SUBJECT, 0, PROMPT_TOKENS))

    def _row(self, sequence: SequenceId, start: int, count: int) -> Row:
        """A row over blocks of its own, in reverse order."""
        first = self._num_blocks * int(sequence)
        table = tuple(BlockId(first + index) for index in reversed(range(self._num_blocks)))
        return Row(sequence, start, count, (table,), sample=sequence == SUBJECT)

    def _run(self, *rows: Row) -> torch.Tensor:
        with torch.inference_mode():
            return _logits(self._model, self._batch(*rows))

    def _batch(self, *rows: Row) -> PagedBatch:
        generations = cast(Generations, self._prompts)
        return build_batch(StepPlan(step_id=0, rows=rows), generations, self._kv_cache)


def _logits(model: PreTrainedModel, batch: PagedBatch) -> torch.Tensor:
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.positions,
        use_cache=False,
        logits_to_keep=batch.sampled_rows,
        paged=batch,
    )
    return cast(torch.Tensor, output.logits)[0].float()


def _prompt(model: PreTrainedModel, stride: int) -> Prompt:
    """Tokens from all over the vocabulary, no two alike if it is large enough."""
    size = vocabulary_size(model)
    return Prompt([(7919 * stride * (index + 1)) % size for index in range(PROMPT_TOKENS)], SamplingParams())
