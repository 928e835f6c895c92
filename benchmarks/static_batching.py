"""Static batching with the engine's own scheduler, model and kernels, to hold continuous batching against.

A batch is filled with what waits and runs to its longest; only then does the next begin. In three kinds:

- *Padded*, as batches of one tensor do it: every prompt costs as much as the longest, and the row of a
  sequence that has ended is computed until its output is as long as the longest.
- *Packed*: prompts cost what they are. Rows of ended sequences are computed as in padded batches.
- *Shrinking*: neither. Ended sequences drop out; only their places stay empty until the batch has ended.

All are given what static batching seldom has: memory in blocks, prompts computed beside decodes, and
each answer as soon as its own sequence ends, not at the end of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from tidemill import SamplingParams
from tidemill_scheduler import NeverFits, Scheduler, SchedulerConfig, Sequence, SequenceId, StepPlan
from tidemill_scheduler.costs import RestoreCosts
from tidemill_scheduler.plan import Row
from tidemill_scheduler.sequence import BlockId
from tidemill_worker.engine import Runner, StepTokens
from tidemill_worker.generation import Generation, OpenRequest
from tidemill_worker.request import Request

MAX_QUEUE_DELAY = 0.2
"""Seconds that a batch which is not full waits for more jobs. A burst comes in over some 0.1 s, and its
first batch, begun with a few of them, would cost static batching tens of times that."""
PADDING = SequenceId(-1)


class StaticScheduler(Scheduler):
    """Holds new sequences back until the batch has ended, and may compute what nobody has asked for.

    What is computed for nobody stays out of the plans that the caller sees; `padded_plan` is the last
    one with it. The caller runs it through `PaddedRunner`.

    Args:
        batch_size: sequences in a batch at most.
        pads_prompts: whether every prompt costs as much as the batch's longest.
        keeps_ended: whether rows of ended sequences are computed until the batch's longest output
            has ended; they drop out otherwise.
        max_queue_delay: seconds that the first of an incomplete batch waits for others.
        clock: in seconds.

    Raises:
        ValueError: if a batch could exceed `max_num_seqs` or the KV memory.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        batch_size: int,
        pads_prompts: bool,
        keeps_ended: bool,
        max_queue_delay: float = MAX_QUEUE_DELAY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config)
        largest = min(config.max_num_seqs, _rows_that_fit(config))
        if not 1 <= batch_size <= largest:
            raise ValueError(
                f"batch_size is {batch_size}, must be 1 to {largest}: max_num_seqs, and as many sequences"
                f" of max_model_len tokens as the KV memory holds"
            )
        self.padded_plan = StepPlan(-1)
        self._batch_size = batch_size
        self._pads_prompts = pads_prompts
        self._keeps_ended = keeps_ended
        self._max_queue_delay = max_queue_delay
        self._clock = clock
        self._line: dict[SequenceId, tuple[Sequence, float]] = {}  # with the time each began to wait
        self._live: dict[SequenceId, Sequence] = {}
        self._ended: dict[SequenceId, Sequence] = {}
        self._num_padding_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no memory, those that wait for the next batch among them."""
        return super().num_waiting + len(self._line)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence that was added has not been finished."""
        return super().has_unfinished or bool(self._line)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for the next batch.

        Raises:
            NeverFits: if it is longer than any batch may be.
        """
        limit = self.config.max_model_len
        if sequence.max_total_tokens > limit:
            raise NeverFits("max_model_len", needed=sequence.max_total_tokens, limit=limit)
        self._line[sequence.id] = sequence, self._clock()

    def schedule(self) -> StepPlan:
        """Plan the batch's next step, or the first one of the next batch."""
        self._drop_complete()
        if not self._live and self._is_due():
            self._begin_batch()
        self.padded_plan = plan = super().schedule()
        return replace(plan, rows=tuple(row for row in plan.rows if row.sequence in self._live))

    def finish(self, sequence_id: SequenceId) -> None:
        """Let go of a sequence, whose row is still computed if the batch keeps ended ones.

        Raises:
            KeyError: if no such sequence is here.
        """
        if self._line.pop(sequence_id, None) is not None:
            return
        self._ended[sequence_id] = self._live.pop(sequence_id)
        if not (self._keeps_ended and self._live):
            self._drop(list(self._ended))

    def take_padding(self) -> int:
        """Padding of prompts that is due since the last call, in tokens."""
        taken, self._num_padding_tokens = self._num_padding_tokens, 0
        return taken

    def _drop_complete(self) -> None:
        """Let go of rows with an output as long as the longest; the scheduler asks it of its caller."""
        self._drop([ended.id for ended in self._ended.values() if ended.is_complete])

    def _drop(self, ended: list[SequenceId]) -> None:
        for sequence_id in ended:
            del self._ended[sequence_id]
            super().finish(sequence_id)

    def _is_due(self) -> bool:
        if not self._line:
            return False
        _, since = next(iter(self._line.values()))
        return len(self._line) >= self._batch_size or self._clock() - since >= self._max_queue_delay

    def _begin_batch(self) -> None:
        members = [self._line.pop(waiting)[0] for waiting in list(self._line)[: self._batch_size]]
        if self._pads_prompts:
            self._pad_prompts(members)
        if self._keeps_ended:
            self._pad_outputs(members)
        for member in members:
            super().add(member)
            self._live[member.id] = member

    def _pad_prompts(self, members: list[Sequence]) -> None:
        longest = max(member.num_prompt_tokens for member in members)
        self._num_padding_tokens += sum(longest - member.num_prompt_tokens for member in members)

    def _pad_outputs(self, members: list[Sequence]) -> None:
        """Let all outputs become as long as the longest, as far as `max_model_len` goes."""
        longest = max(member.max_total_tokens - member.num_prompt_tokens for member in members)
        for member in members:
            padded = member.num_prompt_tokens + longest
            member.max_total_tokens = min(padded, self.config.max_model_len)


def _rows_that_fit(config: SchedulerConfig) -> int:
    blocks_per_row = -(-config.max_model_len // config.block_size)
    return int(config.num_blocks * (1.0 - config.watermark)) // blocks_per_row


class CountingRunner:
    """Passes plans on and counts the tokens that they compute."""

    def __init__(self, runner: Runner) -> None:
        self.num_tokens = 0
        self._runner = runner

    @property
    def costs(self) -> RestoreCosts:
        return self._runner.costs

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> StepTokens:
        """Execute a plan, whatever it is for."""
        self.num_tokens += plan.num_tokens
        return self._runner.run(plan, generations)


class PaddedRunner:
    """Executes a `StaticScheduler`'s plans together with their padding.

    The rows of ended sequences go through the model like those of the others. The padding of the
    prompts is computed before the batch's first step. It reads and writes blocks that are none of
    the scheduler's, and less of them than one tensor of prompts would: no key of the prompt itself.

    Args:
        runner: what executes them.
        scheduler: where the plans come from.
        scratch: blocks for padding that the scheduler does not have.
    """

    def __init__(self, runner: Runner, scheduler: StaticScheduler, scratch: tuple[BlockId, ...]) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._scratch = scratch
        self._known: dict[SequenceId, Generation] = {}

    @property
    def costs(self) -> RestoreCosts:
        return self._runner.costs

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> StepTokens:
        """Execute the scheduler's last plan, of which the engine knows the part `plan`."""
        self._compute_padding(self._scheduler.take_padding())
        padded = self._scheduler.padded_plan
        known = {**self._known, **generations}
        self._known = {row.sequence: known[row.sequence] for row in padded.rows}
        return self._runner.run(padded, self._known)

    def _compute_padding(self, num_tokens: int) -> None:
        config = self._scheduler.config
        step = min(config.max_num_batched_tokens, len(self._scratch) * config.block_size)
        for start in range(0, num_tokens, step):
            count = min(step, num_tokens - start)
            row = Row(PADDING, 0, count, (self._scratch,), sample=False)
            self._runner.run(StepPlan(-1, (row,)), {PADDING: _padding(count)})


def _padding(num_tokens: int) -> Generation:
    """A prompt of zeros, after which nothing comes."""
    token_ids = [0] * num_tokens
    request = Request("padding", token_ids, SamplingParams(), seed=0, choices=())
    sequence = Sequence(
        id=PADDING, token_ids=token_ids, num_prompt_tokens=num_tokens, max_total_tokens=num_tokens + 1
    )
    return Generation(OpenRequest(request, added=0.0), sequence, None, ())
