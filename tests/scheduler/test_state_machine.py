"""Any interleaving of adds, steps, returns, aborts and preemptions, in two tiers that are always short."""

from __future__ import annotations

from dataclasses import astuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from tests.scheduler.factories import MiniEngine, make_fork, make_sequence, make_tokens
from tidemill_scheduler import PreemptionMode, RestoreCosts, SequenceId
from tidemill_scheduler.counters import Counters

SECONDS_PER_BLOCK = [1e-6, 1e-3, 1.0]
"""A token of a prompt costs 1e-3: copying is cheaper than computing, depends on the blocks, is dearer."""


class SchedulerMachine(RuleBasedStateMachine):
    """`MiniEngine` checks the books and both tiers after each call, and every output when it ends."""

    sequences = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(6, 14),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        room=st.integers(0, 10),
        chunk=st.integers(1, 8),
        caching=st.booleans(),
        chunked=st.booleans(),
        in_flight=st.integers(1, 2),
        num_swap_blocks=st.sampled_from([0, 1, 3, 8, 40]),
        mode=st.sampled_from(PreemptionMode),
        watermark=st.sampled_from([0.0, 0.01, 0.1, 0.2]),
    )
    def start(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        room: int,
        chunk: int,
        caching: bool,
        chunked: bool,
        in_flight: int,
        num_swap_blocks: int,
        mode: PreemptionMode,
        watermark: float,
    ) -> None:
        max_model_len = 24
        self.engine = MiniEngine(
            in_flight=in_flight,
            eos=5,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + room + (0 if chunked else max_model_len),
            max_prefill_chunk=chunk,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            num_swap_blocks=num_swap_blocks,
            preemption_mode=mode,
            watermark=watermark,
            ageing_steps=8,
            max_overtakes=2,
        )
        self.num_added = 0
        self.counters = astuple(Counters())

    @rule(
        target=sequences,
        family=st.integers(0, 1),
        shared=st.integers(0, 16),
        length=st.integers(1, 16),
        new=st.integers(1, 10),
        generated=st.integers(0, 3),
        priority=st.integers(0, 2),
        deadline=st.none() | st.integers(0, 3).map(float),
        salt=st.sampled_from([b"", b"tenant"]),
        compute_prompt=st.booleans(),
    )
    def add(
        self,
        *,
        family: int,
        shared: int,
        length: int,
        new: int,
        generated: int,
        priority: int,
        deadline: float | None,
        salt: bytes,
        compute_prompt: bool,
    ) -> SequenceId:
        """It begins like all of its family, and goes on by itself."""
        limit = self.engine.scheduler.config.max_total_tokens
        own = make_tokens(length, first=1000 * (self.num_added + 2))
        tokens = [*make_tokens(length, first=1000 * family)[:shared], *own[shared:]][: limit - 1]
        sequence = make_sequence(
            self.num_added,
            prompt=tokens,
            num_prompt_tokens=max(1, len(tokens) - generated),
            max_total_tokens=min(len(tokens) + new, limit),
            priority=priority,
            deadline=deadline,
            salt=salt,
            compute_prompt=compute_prompt,
        )
        self.engine.add(sequence)
        self.num_added += 1
        return sequence.id

    @rule(
        target=sequences,
        parent_id=sequences,
        siblings=st.integers(1, 3),
        new=st.integers(1, 10),
        generated=st.integers(0, 3),
        priority=st.integers(0, 2),
    )
    def fork(
        self, *, parent_id: SequenceId, siblings: int, new: int, generated: int, priority: int
    ) -> MultipleResults[SequenceId]:
        """Of one that waits, runs, is a fork itself, or has ended."""
        parent = self.engine.sequences[parent_id]
        limit = self.engine.scheduler.config.max_total_tokens
        generated = min(generated, limit - 1 - parent.num_prompt_tokens)
        forks = [
            make_fork(
                self.num_added + number,
                parent,
                generated=make_tokens(generated),
                max_total_tokens=min(parent.num_prompt_tokens + generated + new, limit),
                priority=priority,
            )
            for number in range(siblings)
        ]
        self.engine.add(*forks)
        self.num_added += siblings
        return multiple(*(fork.id for fork in forks))

    @rule()
    def schedule(self) -> None:
        if len(self.engine.plans) < self.engine.in_flight:
            self.engine.schedule()

    @rule()
    def land(self) -> None:
        if self.engine.plans:
            self.engine.land()

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(sequence_id=sequences)
    def preempt(self, sequence_id: SequenceId) -> None:
        if sequence_id in self.engine.unfinished():
            self.engine.scheduler.preempt(sequence_id)
            self.engine.check()

    @rule(seconds_per_block=st.sampled_from(SECONDS_PER_BLOCK))
    def measure(self, seconds_per_block: float) -> None:
        self.engine.scheduler.costs = RestoreCosts(1e-3, seconds_per_block)

    @rule(sequence_id=consumes(sequences))
    def abort(self, sequence_id: SequenceId) -> None:
        if sequence_id in self.engine.unfinished():
            self.engine.abort(sequence_id)

    @invariant()
    def counters_only_rise(self) -> None:
        now = astuple(self.engine.scheduler.counters)
        assert all(new >= old for new, old in zip(now, self.counters, strict=True))
        self.counters = now

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run(max_steps=200 + 60 * self.num_added)
        assert len(self.engine.finished) == len(set(self.engine.finished)) == self.num_added
        self.engine.check_baseline()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
