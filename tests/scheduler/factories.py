"""Schedulers, sequences, and an engine in miniature that runs them on the fake model."""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.scheduler.contents import KnownContents
from tests.scheduler.fake_model import FakeModel, undisturbed
from tidemill_scheduler import BlockId, Scheduler, SchedulerConfig, Sequence, SequenceId, StepPlan


def make_config(**changes: Any) -> SchedulerConfig:
    """Small sizes, so that tests reach the limits; `changes` overrides any of them."""
    sizes: dict[str, Any] = {
        "num_blocks": 32,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "max_prefill_chunk": 32,
    }
    return SchedulerConfig(**(sizes | changes))


def make_scheduler(**changes: Any) -> Scheduler:
    return Scheduler(make_config(**changes))


def make_tokens(count: int, *, first: int = 1000) -> list[int]:
    """Token ids that no other `first`, a thousand away, has in common."""
    return list(range(first, first + count))


def make_sequence(number: int = 0, *, prompt: int | list[int] = 8, new: int = 8, **changes: Any) -> Sequence:
    """A sequence with `prompt` token ids, or as many of its own, that generates up to `new`."""
    tokens = make_tokens(prompt, first=1000 * (number + 1)) if isinstance(prompt, int) else list(prompt)
    fields: dict[str, Any] = {
        "id": SequenceId(number),
        "token_ids": tokens,
        "num_prompt_tokens": len(tokens),
        "max_total_tokens": len(tokens) + new,
    }
    return Sequence(**(fields | changes))


def make_fork(
    number: int, parent: Sequence, *, new: int = 8, generated: list[int] | None = None, **changes: Any
) -> Sequence:
    """A sibling with the parent's prompt, resumed after the tokens `generated`."""
    prompt = parent.token_ids[: parent.num_prompt_tokens]
    tokens = [*prompt, *(generated or [])]
    fields = {"fork_of": parent.id, "num_prompt_tokens": len(prompt), "salt": parent.salt}
    return make_sequence(number, prompt=tokens, new=new, **(fields | changes))


def make_family(
    *, prompt: int | list[int] = 8, new: int = 8, siblings: int = 3, **changes: Any
) -> list[Sequence]:
    """Sequence 0 and its forks, 1 and so on."""
    parent = make_sequence(0, prompt=prompt, new=new, **changes)
    return [parent, *(make_fork(number, parent, new=new, **changes) for number in range(1, siblings))]


def rows(plan: StepPlan) -> dict[int, tuple[int, int, bool]]:
    """The (start, count, sample) of each sequence in a plan."""
    return {row.sequence: (row.start, row.count, row.sample) for row in plan.rows}


def step(scheduler: Scheduler, token: int = 7) -> StepPlan:
    """Schedule and land; every row that samples gets the same token."""
    plan = scheduler.schedule()
    if not plan.is_empty:
        scheduler.update(plan.step_id, {row.sequence: token for row in plan.rows if row.sample})
    scheduler.check_integrity()
    return plan


class MiniEngine:
    """Schedules, runs and updates as the worker's engine does, and checks the books at each step.

    Plans are executed as late as their order allows: just before they return. What is free and not
    cached is poisoned as soon as it is, so that a plan in flight that still names it fails. Whenever
    none is in flight, every block of both tiers that is known by a hash is compared with what that
    hash stands for.
    """

    def __init__(self, *, in_flight: int = 1, eos: int | None = None, **changes: Any) -> None:
        self.scheduler = make_scheduler(**changes)
        config = self.scheduler.config
        self.model = FakeModel(config.num_blocks, config.block_size, config.num_swap_blocks)
        self.contents = KnownContents(config.block_size)
        self.in_flight = in_flight
        self.eos = eos
        self.plans: deque[StepPlan] = deque()
        self.history: list[StepPlan] = []
        self.sequences: dict[SequenceId, Sequence] = {}
        self.expected: dict[SequenceId, list[int]] = {}
        self.finished: list[SequenceId] = []

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)
            self.model.add(sequence)
            self.sequences[sequence.id] = sequence
            self.expected[sequence.id] = undisturbed(sequence, eos=self.eos)

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len({row.sequence for row in plan.rows}) == len(plan.rows)
        if not plan.is_empty:
            self.plans.append(plan)
            self.history.append(plan)
        self.check()
        return plan

    def land(self) -> list[SequenceId]:
        """Run the oldest plan in flight and give it back."""
        plan = self.plans.popleft()
        received = self.scheduler.update(plan.step_id, self.model.execute(plan))
        for sequence_id in received:
            self._finish_if_ended(self.sequences[sequence_id])
        self.check()
        return received

    def _finish_if_ended(self, sequence: Sequence) -> None:
        if len(sequence.token_ids) == sequence.max_total_tokens or sequence.token_ids[-1] == self.eos:
            self.scheduler.finish(sequence.id)
            self.finished.append(sequence.id)
            assert sequence.token_ids == self.expected[sequence.id]
            assert not sequence.compute_prompt or not self.uncomputed_of(sequence)

    def step(self) -> StepPlan:
        """Schedule once; land what is then one too many, or all there is if nothing was planned."""
        plan = self.schedule()
        assert not plan.is_empty or self.plans or not self.scheduler.has_unfinished, "stalled for good"
        if self.plans and (plan.is_empty or len(self.plans) >= self.in_flight):
            self.land()
        return plan

    def run(self, *, max_steps: int = 2000) -> None:
        """Step until every sequence has ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.plans:
                return
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps: {self.unfinished()}")

    def unfinished(self) -> set[SequenceId]:
        return set(self.sequences) - set(self.finished)

    def abort(self, sequence_id: SequenceId) -> None:
        self.scheduler.finish(sequence_id)
        self.finished.append(sequence_id)
        self.check()

    def check(self) -> None:
        self.scheduler.check_integrity()
        pool = self.scheduler._memory.pool
        for block in map(BlockId, range(pool.num_blocks)):
            if pool.is_free(block) and pool.hash_of(block) is None:
                self.model.poison(block)
        for sequence in self.sequences.values():
            self.contents.learn(sequence)
        if not self.plans:
            self.contents.check(self.scheduler, self.model)

    def check_baseline(self) -> None:
        """With everything finished and returned, nothing is held, kept, awaited or remembered."""
        scheduler, config = self.scheduler, self.scheduler.config
        assert not scheduler.has_unfinished and not self.plans
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
        assert (scheduler.kv_usage, scheduler.swap_usage) == (0.0, 0.0)
        assert scheduler._memory.pool.num_free == config.num_blocks
        assert not scheduler._underway._leaders
        assert not scheduler._order._arrivals and not scheduler._order._num_members
        assert not scheduler._waiting.num_aside

    def uncomputed_of(self, sequence: Sequence) -> set[int]:
        """Positions of a sequence's prompt that none of its own rows has computed."""
        done = (range(start, start + count) for start, count in self.rows_of(sequence.id))
        return set(range(sequence.num_prompt_tokens)).difference(*done)

    @property
    def num_prompt_tokens_computed(self) -> int:
        """Over all sequences and rows; what is computed again counts again."""
        return sum(
            max(0, min(row.start + row.count, self.sequences[row.sequence].num_prompt_tokens) - row.start)
            for plan in self.history
            for row in plan.rows
        )

    def rows_of(self, number: int) -> list[tuple[int, int]]:
        """The (start, count) of a sequence's rows, in the order of the plans."""
        return [
            (row.start, row.count) for plan in self.history for row in plan.rows if row.sequence == number
        ]


def make_hungry(number: int, engine: MiniEngine, *, priority: int = 0, spare: int = 0) -> Sequence:
    """One that takes all memory which nobody before it holds, but for some spare blocks, and fills it.

    It ends with its first token; by then, what lower ones had on the device is overwritten.
    """
    pool = engine.scheduler._memory.pool
    held = {
        block
        for sequence in engine.scheduler._running
        if sequence.priority <= priority
        for block in sequence.block_table
    }
    prompt = (pool.num_blocks - len(held) - spare) * engine.scheduler.config.block_size
    return make_sequence(number, prompt=prompt, new=1, priority=priority)


def make_decoding(*, prompt: int = 7, steps: int = 2, **changes: Any) -> tuple[MiniEngine, Sequence]:
    """An engine in which sequence 0 has computed its prompt and decodes."""
    engine = MiniEngine(block_size=4, **changes)
    engine.add(parent := make_sequence(0, prompt=prompt, new=12))
    for _ in range(steps):
        engine.step()
    return engine, parent
