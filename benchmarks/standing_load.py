"""Engines and schedulers in a steady state: so many run, so many wait, and whoever ends is replaced."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidemill import SamplingParams
from tidemill_scheduler import RestoreCosts, Scheduler, SchedulerConfig, SequenceId, StepPlan
from tidemill_scheduler import Sequence as ScheduledSequence
from tidemill_worker.engine import Engine
from tidemill_worker.generation import Generation, RankedToken
from tidemill_worker.request import OpenChoice, Request

PROMPT_TOKENS = 32
OUTPUT_TOKENS = (32, 224)
"""Drawn evenly: of 256 that run, two end in a step on average."""
BLOCK_SIZE = 16
ENOUGH_BLOCKS = -(-(PROMPT_TOKENS + OUTPUT_TOKENS[1]) // BLOCK_SIZE)
"""Blocks of the longest sequence."""
SCARCE_BLOCKS = 6
"""Blocks for each sequence that may run, of the 7 that it holds on average: they preempt each other."""


class Load(Protocol):
    """One contender."""

    name: str

    @property
    def scheduler(self) -> Scheduler:
        """What plans its steps."""

    def step(self) -> float:
        """Take one step; return its seconds. Replacing those that have ended does not count."""


class Prompts:
    """Prompts no two of which begin alike, cut from one list so that they share the ids' memory."""

    def __init__(self) -> None:
        self._dice = random.Random(0)
        self._ids = list(range(1 << 18))
        self._num_drawn = 0

    def draw(self) -> tuple[list[int], int]:
        """A prompt, and how many tokens to generate after it."""
        first = self._num_drawn % (len(self._ids) - PROMPT_TOKENS)
        self._num_drawn += 1
        return self._ids[first : first + PROMPT_TOKENS], self._dice.randint(*OUTPUT_TOKENS)


def make_scheduler(running: int, *, scarce: bool = False) -> Scheduler:
    num_blocks = running * (SCARCE_BLOCKS if scarce else ENOUGH_BLOCKS)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        num_swap_blocks=4 * num_blocks if scarce else 0,
        max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS[1],
        block_size=BLOCK_SIZE,
        max_num_seqs=running,
    )
    return Scheduler(config)


class SchedulerLoad:
    """The scheduler alone: `schedule`, then `update` and `finish`."""

    def __init__(self, running: int, waiting: int, *, scarce: bool = False) -> None:
        self.name = f"step_us_{running}_{waiting}" + ("_scarce" if scarce else "")
        self.scheduler = make_scheduler(running, scarce=scarce)
        self._prompts = Prompts()
        self._sequences: dict[SequenceId, ScheduledSequence] = {}
        self._num_added = 0
        for _ in range(running + waiting):
            self._add()

    def _add(self) -> None:
        prompt, num_output = self._prompts.draw()
        sequence = ScheduledSequence(
            id=SequenceId(self._num_added),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            max_total_tokens=len(prompt) + num_output,
        )
        self._num_added += 1
        self._sequences[sequence.id] = sequence
        self.scheduler.add(sequence)

    def step(self) -> float:
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        sampled = sample(plan)
        ended = self._last_tokens(sampled)
        ran = time.perf_counter()
        self.scheduler.update(plan.step_id, sampled)
        for sequence_id in ended:
            self.scheduler.finish(sequence_id)
        seconds = time.perf_counter() - ran + scheduled - start
        for sequence_id in ended:
            del self._sequences[sequence_id]
            self._add()
        return seconds

    def _last_tokens(self, sampled: Mapping[SequenceId, int]) -> list[SequenceId]:
        """Those whose last token is among these."""
        return [sequence_id for sequence_id in sampled if self._sequences[sequence_id].is_complete]


def sample(plan: StepPlan) -> dict[SequenceId, int]:
    """A token for each row that wants one; which it is makes no difference."""
    return {row.sequence: 7 for row in plan.rows if row.sample}


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the engine wants of a step, without logprobs."""

    tokens: Mapping[SequenceId, int]
    logprobs: Mapping[SequenceId, RankedToken] = field(default_factory=dict)
    prompt_logprobs: Mapping[SequenceId, Sequence[RankedToken]] = field(default_factory=dict)


class NullRunner:
    """Computes nothing, at once."""

    costs = RestoreCosts()

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> SampledTokens:
        return SampledTokens(sample(plan))


class NullText:
    """Text that is never made: detokenization is not what is measured."""

    def append(self, token_id: int) -> str | None:
        return None

    def take(self) -> str:
        return ""

    def close(self) -> str:
        return ""


class EngineLoad:
    """`Engine.step` around a model that takes no time."""

    def __init__(self, running: int, waiting: int) -> None:
        self.name = f"engine_step_us_{running}_{waiting}"
        self.scheduler = make_scheduler(running)
        self._engine = Engine(NullRunner(), self.scheduler, end_of_text=frozenset())
        self._prompts = Prompts()
        self._params = {
            count: SamplingParams(max_tokens=count) for count in range(OUTPUT_TOKENS[0], OUTPUT_TOKENS[1] + 1)
        }
        self._num_added = 0
        for _ in range(running + waiting):
            self._add()

    def _add(self) -> None:
        prompt, num_output = self._prompts.draw()
        choice = OpenChoice(0, NullText())
        params = self._params[num_output]
        self._engine.add(Request(str(self._num_added), prompt, params, seed=0, choices=[choice]))
        self._num_added += 1

    def step(self) -> float:
        start = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start
        for output in outputs:
            if output.finished:
                self._add()
        return seconds


def settle(load: Load) -> None:
    """Step until all that ran first, and together, have been replaced, and most of those after them."""
    for _ in range(2 * OUTPUT_TOKENS[1]):
        load.step()
