"""An engine over a runner that says what it was told to, and text of one letter a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.params import SamplingParams
from tidemill_scheduler import RestoreCosts, Scheduler, SchedulerConfig, SequenceId, StepPlan
from tidemill_worker.engine import Engine, StepOutput
from tidemill_worker.generation import Generation
from tidemill_worker.request import Grammar, OpenChoice, Request

EOS = 99
LETTERS = {1: "a", 2: "b", 3: "c", EOS: "<eos>"}


@dataclass(frozen=True)
class Ranked:
    """A `RankedToken`."""

    token_id: int
    logprob: float
    rank: int = 1
    top: tuple[tuple[int, float], ...] = ()


def ranked(token: int, num_top: int) -> Ranked:
    """What the script says of a token wherever it stands."""
    return Ranked(token, -token / 8, 2, tuple((token + i, -i / 8) for i in range(num_top)))


@dataclass(frozen=True)
class Step:
    """A `StepTokens`."""

    tokens: Mapping[SequenceId, int] = field(default_factory=dict)
    logprobs: Mapping[SequenceId, Ranked] = field(default_factory=dict)
    prompt_logprobs: Mapping[SequenceId, Sequence[Ranked]] = field(default_factory=dict)


@dataclass
class Script:
    """A runner with a line for each generation, `x` or, after the first of a request, `x#1`; then 1s."""

    lines: dict[str, list[int]]
    plans: list[StepPlan] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    """What the grammars allowed, row by row."""
    costs: RestoreCosts = field(default_factory=RestoreCosts)

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> Step:
        self.plans.append(plan)
        tokens, logprobs, prompt_logprobs = {}, {}, {}
        for row in plan.rows:
            generation = generations[row.sequence]
            if (wanted := generation.num_prompt_logprobs) is not None:
                scored = generation.token_ids[row.start + 1 : row.start + 1 + row.count]
                scored = scored[: max(0, generation.num_prompt_tokens - row.start - 1)]
                prompt_logprobs[row.sequence] = [ranked(token, wanted) for token in scored]
            if row.sample:
                tokens[row.sequence] = token = self._next(generation)
                if generation.params.logprobs is not None:
                    logprobs[row.sequence] = ranked(token, generation.params.logprobs)
        return Step(tokens, logprobs, prompt_logprobs)

    def _next(self, generation: Generation) -> int:
        allowed = generation.allowed_tokens()
        if allowed is not None:
            self.masks.append([token for token in range(128) if allowed[token // 32] >> (token % 32) & 1])
        name = generation.owner.request.id
        line = self.lines.get(f"{name}#{generation.choice}" if generation.choice else name, [])
        return line.pop(0) if line else 1


class Letters:
    """Text of one letter a token, that stops at a string and holds back its first letter."""

    def __init__(self, stop: str | None = None) -> None:
        self.stop, self.all, self.taken = stop, "", 0

    def append(self, token_id: int) -> str | None:
        self.all += LETTERS[token_id]
        if self.stop and self.stop in self.all:
            self.all = self.all.split(self.stop)[0]
            return self.stop
        return None

    def take(self) -> str:
        held_back = self.stop is not None and self.all.endswith(self.stop[0])
        return self._up_to(len(self.all) - held_back)

    def close(self) -> str:
        return self._up_to(len(self.all))

    def _up_to(self, end: int) -> str:
        text, self.taken = self.all[self.taken : end], end
        return text


class Spelling:
    """A grammar of one sentence."""

    def __init__(self, *tokens: int) -> None:
        self.left = list(tokens)
        self.error: str | None = None

    def accept(self, token_id: int) -> None:
        assert token_id == self.left.pop(0)

    def allowed_tokens(self) -> NDArray[np.uint32]:
        words = np.zeros(4, np.uint32)
        token = self.left[0] if self.left else EOS
        words[token // 32] = 1 << (token % 32)
        return words

    @property
    def is_complete(self) -> bool:
        return not self.left


def make_engine(lines: dict[str, list[int]] | None = None, **config: Any) -> Engine:
    settings: dict[str, Any] = {"num_blocks": 16, "block_size": 4, "max_model_len": 512}
    return Engine(Script(lines or {}), Scheduler(SchedulerConfig(**(settings | config))), frozenset({EOS}))


def make_request(
    name: str,
    prompt: Sequence[int] = (7, 8, 9),
    stop: str | None = None,
    grammar: Grammar | None = None,
    resumed: Sequence[int] = (),
    deadline: float | None = None,
    **params: Any,
) -> Request:
    """A request for `params["n"]` generations; stop string, grammar and earlier tokens are the first's."""
    wanted = SamplingParams(**({"max_tokens": 5} | params))
    choices = [
        OpenChoice(0, Letters(stop), grammar, tuple(resumed)),
        *(OpenChoice(index, Letters()) for index in range(1, wanted.n)),
    ]
    return Request(name, prompt, wanted, 0, choices, deadline=deadline)


def script(engine: Engine) -> Script:
    assert isinstance(engine.runner, Script)
    return engine.runner


def run(engine: Engine) -> dict[str, list[StepOutput]]:
    """Step until nothing is left; the outputs of each request."""
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_integrity()
    return outputs


def text(outputs: Sequence[StepOutput], choice: int = 0) -> str:
    return "".join(output.text for output in outputs if output.choice == choice)


def tokens(outputs: Sequence[StepOutput], choice: int = 0) -> list[int]:
    return [token for output in outputs if output.choice == choice for token in output.token_ids]
