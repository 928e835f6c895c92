"""Jobs of several generations on small engines: cancelled, late, lost, preempted and resumed at any step,
each generation is what the model says of it, and everything stored of it is there once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from tests.worker.factories import MODEL, make_admission, make_claim, make_job, make_limits, make_tokenizer
from tests.worker.scripted import Script, Step, ranked
from tidemill.jobs import Delta, FinishReason, Job, Result, Status
from tidemill.moves import Renewal
from tidemill_scheduler import Scheduler, SchedulerConfig, SequenceId, StepPlan
from tidemill_worker.answers import CUT_SHORT, Answers
from tidemill_worker.engine import Engine
from tidemill_worker.generation import Generation
from tidemill_worker.held import HeldJob, HeldJobs
from tidemill_worker.request import Request
from tidemill_worker.token_logprobs import on_wire

END = 1
BROKEN = 99
"""A prompt that begins with this token leaves one of its generations without a token to draw."""
ANSWERS = Answers(model=MODEL, worker="w1")
TOKENIZER = make_tokenizer()
ADMISSION = make_admission(tokenizer=TOKENIZER, limits=make_limits(max_model_len=32))


def said(prompt: int, choice: int, position: int) -> int:
    """What the model says, whatever has happened before; some generations end early."""
    if prompt == BROKEN and (choice, position) == (1, 2):
        return -1
    dice = 31 * prompt + 17 * choice + 7 * position
    return END if dice % 11 == 0 else 70 + dice % 180


@dataclass
class Time:
    """Seconds that pass by a rule of their own."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Model(Script):
    """Computes nothing that is late."""

    clock: Time = field(default_factory=Time)

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> Step:
        for row in plan.rows:
            deadline = generations[row.sequence].owner.request.deadline
            assert deadline is None or deadline > self.clock()
        return super().run(plan, generations)

    def _next(self, generation: Generation) -> int:
        return said(generation.token_ids[0], generation.choice, generation.num_output_tokens)


@dataclass
class Story:
    """One job, and what the queue has of it."""

    job: Job
    deadline: float | None = None
    """By the machine's clock."""
    attempt: int = 0
    held: HeldJob | None = None
    stored: list[Delta] = field(default_factory=list)
    result: Result | None = None

    def store(self, renewal: Renewal) -> None:
        """As the queue does: what it has, it knows by the index."""
        for delta in renewal.deltas:
            have = sum(len(delta.token_ids) for delta in self.stored)
            assert delta.index <= have
            if delta.index == have:
                self.stored.append(Delta.from_wire(delta.to_wire()))


class GenerationsMachine(RuleBasedStateMachine):
    stories = Bundle("stories")

    @initialize(
        num_blocks=st.integers(8, 20),
        max_num_seqs=st.integers(1, 5),
        room=st.integers(0, 8),
        caching=st.booleans(),
        chunked=st.booleans(),
    )
    def start(self, *, num_blocks: int, max_num_seqs: int, room: int, caching: bool, chunked: bool) -> None:
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=32,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + room + (0 if chunked else 32),
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
        )
        self.clock = Time()
        self.admission = replace(ADMISSION, clock=self.clock)
        self.engine = Engine(
            Model({}, clock=self.clock), Scheduler(config), frozenset({END}), clock=self.clock
        )
        self.held = HeldJobs()
        self.all: dict[str, Story] = {}

    @rule(
        target=stories,
        prompt=st.integers(60, 64) | st.just(BROKEN),
        length=st.integers(1, 12),
        n=st.integers(1, 8),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from(["high", "normal", "low"]),
        logprobs=st.none() | st.integers(0, 2),
        prompt_logprobs=st.none() | st.integers(0, 2),
        deadline=st.none() | st.integers(1, 9),
    )
    def submit(
        self, *, prompt: int, length: int, priority: str, deadline: int | None, **params: Any
    ) -> Story:
        tokens = [prompt, *range(100, 99 + length)]
        job = make_job(
            None,
            prompt_token_ids=tokens,
            priority=priority,
            deadline=deadline,
            params={"temperature": 1.0} | params,
        )
        self.all[job.id] = story = Story(job, None if deadline is None else self.clock() + deadline)
        self.claim(story)
        return story

    def claim(self, story: Story) -> None:
        story.attempt += 1
        claim = make_claim(
            story.job,
            attempt=story.attempt,
            checkpoint=tuple(story.stored),
            claimed_ms=int(1000 * self.clock()),
            submitted_ms=0,
            deadline_ms=None if story.deadline is None else int(1000 * story.deadline),
        )
        story.held = self.admission.hold(claim)
        self.held.hold(story.held)
        prepared = self.admission.prepare(claim, story.held)
        if isinstance(prepared, Request):
            self.engine.add(prepared)
        else:
            self.finish(story.held, prepared)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for held, output in self.held.record(self.engine.step()):
                if output.finished:
                    self.finish(held, ANSWERS.generated(held, output))
        self.engine.check_integrity()

    def finish(self, held: HeldJob, result: Result) -> None:
        story = self.all[held.id]
        assert story.result is None
        story.result = Result.from_wire(result.to_wire())
        if result.status is Status.EXPIRED:
            assert story.deadline is not None
            assert story.deadline <= self.clock()
        self.held.forget(held.request_id)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(reply_lost=st.booleans())
    def renew(self, reply_lost: bool) -> None:
        renewals = self.held.renewals(everything=True)
        for renewal in renewals:
            self.all[renewal.job_id].store(renewal)
        if not reply_lost:
            self.held.confirm(renewals)

    @rule(story=stories)
    def lose(self, story: Story) -> None:
        """Another attempt takes the job up from what is stored."""
        if story.result is None and story.held is not None:
            self.held.end(story.held.request_id)
            self.engine.abort(story.held.request_id)
            self.held.forget(story.held.request_id)
            self.claim(story)

    @rule(story=consumes(stories))
    def cancel(self, story: Story) -> None:
        if story.result is None and story.held is not None:
            assert self.held.end(story.held.request_id) is story.held
            self.engine.abort(story.held.request_id)
            self.finish(story.held, ANSWERS.cancelled(story.held))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_unfinished:
            self.step(1)
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
        for story in self.all.values():
            check(story)


def check(story: Story) -> None:
    result, params = story.result, story.job.params
    prompt = story.job.prompt_token_ids
    assert result is not None
    assert prompt is not None
    assert len(result.choices) == params.n
    if result.status is not Status.EXPIRED:  # then it may never have been tokenized
        assert result.usage.prompt_tokens == len(prompt)
    for choice in result.choices:
        line = [said(prompt[0], choice.index, position) for position in range(params.max_tokens)]
        whole = line[: line.index(END) + 1] if END in line else line
        assert list(choice.token_ids) == whole[: len(choice.token_ids)]
        if choice.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert list(choice.token_ids) == whole
            assert choice.finish_reason == ("stop" if END in line else "length")
        else:
            assert choice.finish_reason == CUT_SHORT[result.status]
        entries = (ranked(token, params.logprobs or 0) for token in choice.token_ids)
        said_of_them = on_wire(entries, TOKENIZER.token_text)
        assert choice.logprobs == (None if params.logprobs is None else said_of_them)
        stored = [delta for delta in story.stored if delta.choice == choice.index]
        tokens = sum((delta.token_ids for delta in stored), ())
        assert tokens == choice.token_ids[: len(tokens)]
        assert choice.text.startswith("".join(delta.text for delta in stored))
        if len(tokens) == len(whole):
            assert stored[-1].finish_reason == choice.finish_reason
    assert (result.status is Status.FAILED) <= (prompt[0] == BROKEN and params.n > 1)
    if result.status is Status.SUCCEEDED and params.prompt_logprobs is not None:
        scored = on_wire(
            (ranked(token, params.prompt_logprobs) for token in prompt[1:]), TOKENIZER.token_text
        )
        assert result.prompt_logprobs == (None, *scored)


TestGenerationsMachine = GenerationsMachine.TestCase
TestGenerationsMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
