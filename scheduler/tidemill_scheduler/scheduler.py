"""Decides, step by step, which tokens of which sequences are computed, and where their KV lives."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill_scheduler import policy
from tidemill_scheduler.config import SchedulerConfig
from tidemill_scheduler.costs import RestoreCosts
from tidemill_scheduler.counters import Counters
from tidemill_scheduler.errors import DuplicateSequence, IntegrityError
from tidemill_scheduler.flights import Flight, Flights
from tidemill_scheduler.integrity import check_flights, check_sequences, check_shared_blocks
from tidemill_scheduler.memory import KVMemory
from tidemill_scheduler.plan import Row, StepPlan
from tidemill_scheduler.prefix import Prefix
from tidemill_scheduler.prefix_order import PrefixOrder
from tidemill_scheduler.running import RunningSequences
from tidemill_scheduler.sequence import Sequence, SequenceId, SequenceState
from tidemill_scheduler.underway import Underway
from tidemill_scheduler.waiting import WaitingQueue

_ADMISSION_WINDOW = 16
"""Sequences that cannot be admitted now which one step looks past for one that can."""


class Scheduler:
    """Continuous batching over paged KV memory.

    There is no prefill phase and no decode phase: a sequence's computed tokens chase its known ones,
    and a new prompt, a next token, a prefix hit and the recovery from a preemption are one case.

    The caller gives each non-empty plan of `schedule` back to `update`, in their order; it may
    schedule the next plan before the last one has returned. It calls `finish` for every sequence,
    for one that has reached its `max_total_tokens` before it schedules again.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._memory = KVMemory(config, self.counters)
        self._sequences: dict[SequenceId, Sequence] = {}
        self._running = RunningSequences()
        self._waiting = WaitingQueue()
        self._order = PrefixOrder(config.block_size)
        self._underway = Underway(config.block_size)
        self._flights = Flights()
        self._is_pressed = False  # preempted since there was room to spare
        self._num_arrivals = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def num_aside(self) -> int:
        """Those of the waiting who could run, but wait for another to compute what both begin with."""
        return self._waiting.num_aside

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence that was added has not been finished."""
        return bool(self._sequences)

    @property
    def kv_usage(self) -> float:
        """Share of the KV memory, 0 to 1, that could not be given to another sequence now."""
        pool = self._memory.pool
        return 1.0 - pool.num_free / pool.num_blocks

    @property
    def swap_usage(self) -> float:
        """Share of the swap space, 0 to 1, that holds what preempted sequences will need again."""
        return self._memory.swap.usage

    @property
    def costs(self) -> RestoreCosts:
        """What restoring a preempted sequence costs; the caller keeps it up to date."""
        return self._memory.costs

    @costs.setter
    def costs(self, costs: RestoreCosts) -> None:
        self._memory.costs = costs

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn.

        Raises:
            NeverFits: if it could not be finished even with all memory to itself.
            DuplicateSequence: if one with its id has not finished yet.
            ValueError: if this very object was added before (make a new one), or if the prompt or the
                salt is not that of the sibling it forks from.
        """
        if sequence.id in self._sequences:
            raise DuplicateSequence(f"sequence {sequence.id} has not finished yet")
        if sequence.arrival >= 0:
            raise ValueError(f"sequence {sequence.id} has been scheduled before, make a new one")
        self.config.refuse_what_never_fits(sequence.max_total_tokens)
        parent = None if sequence.fork_of is None else self._sequences.get(sequence.fork_of)
        if parent is not None:
            sequence.fork_from(parent)
        sequence.arrival = self._num_arrivals
        sequence.chain_root = self._memory.chain_root(sequence)
        place, step = self._order.enter(sequence), self._flights.next_step
        sequence.rank = policy.rank(sequence, place, step=step, ageing_steps=self.config.ageing_steps)
        self._num_arrivals += 1
        self._sequences[sequence.id] = sequence
        self._waiting.push(sequence)

    def schedule(self) -> StepPlan:
        """Plan the next step; the plan is empty if nothing can be done now.

        Memory comes first, in the order of service: whoever has to give way has no row yet, so that
        nothing is ever rolled back. Then those whose memory is there share the step's tokens.
        """
        num_preemptions = self.counters.num_preemptions
        self._displace()
        ready = self._reserve()
        if self.counters.num_preemptions == num_preemptions:  # else newcomers would be the next to go
            self._admit(ready)
        return self._launch(self._share_out(ready))

    def update(self, step_id: int, sampled: Mapping[SequenceId, int]) -> list[SequenceId]:
        """Take in what a plan has computed; plans return in the order they were made.

        Args:
            step_id: the oldest plan in flight.
            sampled: the token of each row that samples. Those of sequences that were finished
                meanwhile may be missing, and are ignored.

        Returns:
            the sequences that received a token, in the order of the plan's rows. One that was
            preempted after the plan was made receives it all the same.

        Raises:
            ValueError: if it is not this plan's turn.
        """
        flight = self._flights.land(step_id)
        block_size = self.config.block_size
        received = []
        for sequence, row in zip(flight.sequences, flight.plan.rows, strict=True):
            if sequence.state is SequenceState.FINISHED:
                continue
            if row.sample:
                sequence.token_ids.append(sampled[row.sequence])
                received.append(row.sequence)
            num_full_blocks = (row.start + row.count) // block_size
            if num_full_blocks > sequence.num_hashed_blocks and step_id >= sequence.table_step:
                self._register(sequence, num_full_blocks)
        self._memory.pool.release(step_id)
        return received

    def _register(self, sequence: Sequence, num_full_blocks: int) -> None:
        first = sequence.num_hashed_blocks
        self._memory.register(sequence, num_full_blocks)
        self._underway.end(sequence, first, num_full_blocks)
        self._waiting.release(sequence)

    def finish(self, sequence_id: SequenceId) -> None:
        """Let go of a sequence, ended or aborted, at any moment; what it has in flight is ignored.

        Raises:
            KeyError: if no such sequence is here.
        """
        sequence = self._sequences.pop(sequence_id)
        was_running = sequence.state is SequenceState.RUNNING
        sequence.state = SequenceState.FINISHED
        if was_running:
            self._leave(sequence)
        else:
            self._memory.let_go(sequence)
            self._waiting.note_finished(sequence)
        self._order.leave(sequence)
        self._waiting.release(sequence)

    def preempt(self, sequence_id: SequenceId) -> None:
        """Send a running sequence back to the waiting.

        Nothing happens if it waits already, or if its last token is in flight.

        Raises:
            KeyError: if no such sequence is here.
        """
        sequence = self._sequences[sequence_id]
        if sequence.state is SequenceState.RUNNING and not sequence.is_complete:
            self._preempt(sequence)

    def check_integrity(self) -> None:
        """Compare blocks, tables, sequences and plans in flight with each other; for idle moments.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        if len(self._running) + len(self._waiting) != len(self._sequences):
            raise IntegrityError("running and waiting sequences are not all sequences")
        self._memory.check_integrity(self._sequences.values())
        pool, block_size = self._memory.pool, self.config.block_size
        check_sequences(list(self._running), pool, block_size)
        check_shared_blocks(self._running, pool, block_size)
        check_flights(self._flights, pool, block_size)
        self._waiting.check_integrity()
        if len(self._running) > self.config.max_num_seqs:
            raise IntegrityError(f"{len(self._running)} sequences run, max_num_seqs is less")

    def _displace(self) -> None:
        """Put waiting sequences in the place of running ones that are lower in priority."""
        while (head := self._waiting.head()) and (last := self._running.last) and head.rank < last.rank:
            victims = [running for running in self._running if policy.may_displace(head, running)]
            if not victims:
                return
            self._waiting.pop()  # first, since forks of its victims may come to stand before it
            if not self._make_way(head, victims):
                self._waiting.push(head)
                return
            self._place(head, self._memory.find_prefix(head))

    def _make_way(self, newcomer: Sequence, victims: list[Sequence]) -> bool:
        """Preempt as many of these as it takes to place a newcomer; say whether it can be placed now.

        Nobody is preempted in vain: neither if all of them hold too little, nor for blocks that come
        out of quarantine by themselves, nor for a newcomer from whom those before it would take the
        blocks in the same step.
        """
        memory = self._memory
        prefix = memory.find_prefix(newcomer)  # holds throughout: what a victim lets go of stays known
        growth = self._growth_before(newcomer)
        wanted = memory.missing_blocks(newcomer, prefix) + growth - memory.pool.num_quarantined
        if not memory.can_reclaim(wanted, victims, prefix):
            return False
        while (missing := memory.missing_blocks(newcomer, prefix) + growth) > 0 or not self._has_slot:
            if not victims or (self._has_slot and missing <= memory.pool.num_quarantined):
                return False
            victims.remove(victim := self._choose_victim(victims))
            self._preempt(victim)
        return True

    def _growth_before(self, newcomer: Sequence) -> int:
        """Blocks that running sequences will take in this step before it is this one's turn."""
        before = (one for one in self._running if one.rank < newcomer.rank and not one.is_complete)
        return sum(map(self._memory.missing_to_grow, before))

    def _choose_victim(self, candidates: list[Sequence]) -> Sequence:
        return policy.choose_victim(candidates, self._memory.restore_seconds)

    def _reserve(self) -> list[Sequence]:
        """The running sequences that have memory for all their known tokens, in the order of service.

        One that lacks a block takes it from those behind it. If they have none to give it waits, and
        keeps what it has.
        """
        ready = []
        for sequence in tuple(self._running):
            if sequence.is_complete or sequence.state is not SequenceState.RUNNING:
                continue  # about to be finished, or preempted by one before it
            if sequence.num_tokens <= sequence.capacity or self._grow(sequence):
                ready.append(sequence)
        return ready

    def _grow(self, sequence: Sequence) -> bool:
        pool, missing = self._memory.pool, self._memory.missing_to_grow(sequence)
        while missing > pool.num_free:
            victims = [victim for victim in self._running.behind(sequence) if not victim.is_complete]
            if not victims or missing <= pool.num_free + pool.num_quarantined:
                return False
            self._preempt(self._choose_victim(victims))
        self._memory.grow(sequence)
        return True

    def _admit(self, ready: list[Sequence]) -> None:
        """Fill what is left of slots, memory and tokens from the waiting; preempts nobody.

        Those that fit pass those that are blocked, but only so often: see `policy.may_overtake`.
        """
        if not self._waiting or not self._is_open:
            return
        tokens = self.config.max_num_batched_tokens - sum(map(self._demand, ready))
        num_aside, blocked = 0, list[Sequence]()
        while tokens > 0 and self._has_slot and self._memory.pool.num_free:
            if num_aside + len(blocked) >= _ADMISSION_WINDOW or not self._may_overtake(blocked):
                break
            sequence = self._waiting.pop()
            if sequence is None:
                break
            prefix = self._memory.find_prefix(sequence)
            if self._underway.must_wait(sequence, prefix):
                self._waiting.push(sequence)
                num_aside += 1
            elif (missing := self._missing_with_reserve(sequence, prefix)) > 0:
                blocked.append(sequence)
                if missing <= self._memory.pool.num_quarantined:
                    break  # it is coming: lest others take it, and have to give it back
            else:
                self._place(sequence, prefix)
                ready.append(sequence)
                tokens -= self._demand(sequence)
                for passed in blocked:
                    passed.num_overtaken += 1
        self._waiting.push_back(blocked)

    @property
    def _is_open(self) -> bool:
        """Whether there is room to spare, or nobody runs who could make some."""
        if self._is_pressed:
            self._is_pressed = self._memory.pool.num_free < policy.relief_mark(
                num_blocks=self.config.num_blocks, watermark=self.config.watermark
            )
        return not self._is_pressed or not self._running

    def _missing_with_reserve(self, sequence: Sequence, prefix: Prefix) -> int:
        """Blocks that a sequence lacks if those who run shall still be able to grow a little."""
        missing = self._memory.missing_blocks(sequence, prefix)
        if not self._running:
            return missing
        return missing + policy.admission_reserve(
            num_blocks=self.config.num_blocks, watermark=self.config.watermark
        )

    def _may_overtake(self, blocked: list[Sequence]) -> bool:
        return policy.may_overtake(blocked, max_overtakes=self.config.max_overtakes)

    def _demand(self, sequence: Sequence) -> int:
        """Tokens a sequence would take of a step."""
        wanted = sequence.num_uncomputed_tokens
        return min(wanted, self.config.max_prefill_chunk) if self.config.enable_chunked_prefill else wanted

    @property
    def _has_slot(self) -> bool:
        return len(self._running) < self.config.max_num_seqs

    def _place(self, sequence: Sequence, prefix: Prefix) -> None:
        """Give a waiting sequence memory for all its known tokens, and let it run."""
        self._memory.place(sequence, prefix)
        sequence.num_overtaken = 0
        sequence.state = SequenceState.RUNNING
        self._running.add(sequence)
        self._underway.begin(sequence)
        self._waiting.release(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._is_pressed = True
        self.counters.num_preemptions += 1
        self.counters.num_swap_preemptions += self._memory.keep(sequence)
        sequence.num_preemptions += 1
        sequence.num_recompute_tokens = max(sequence.num_recompute_tokens, sequence.num_computed_tokens)
        sequence.state = SequenceState.WAITING
        self._leave(sequence)
        self._waiting.push(sequence)
        self._waiting.release(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence from the running, and its blocks from it."""
        self._running.remove(sequence)
        self._underway.end(sequence, sequence.num_hashed_blocks)
        self._memory.vacate(sequence, last_step=self._flights.newest_step)
        sequence.table_step = self._flights.next_step

    def _share_out(self, ready: list[Sequence]) -> list[tuple[Sequence, int]]:
        """How many tokens each sequence gets: one for every decode, then the prefills."""
        shares = [(sequence, 1) for sequence in ready if sequence.num_uncomputed_tokens == 1]
        if len(shares) == len(ready):
            return shares
        budget = self.config.max_num_batched_tokens - len(shares)
        return shares + policy.share_out(
            [sequence for sequence in ready if sequence.num_uncomputed_tokens > 1],
            budget=budget,
            chunk=budget if len(ready) == 1 else self.config.max_prefill_chunk,
            chunked=self.config.enable_chunked_prefill,
        )

    def _launch(self, shares: list[tuple[Sequence, int]]) -> StepPlan:
        sequences = tuple(sequence for sequence, _ in shares)
        rows = tuple(self._advance(sequence, count) for sequence, count in shares)
        step_id = self._flights.next_step
        copies = self._memory.take_copies(step_id)
        plan = StepPlan(step_id, rows, copies.swap_out, copies.swap_in, copies.block_copies)
        self._flights.launch(Flight(plan, sequences, copies.forks))
        if self._waiting.num_aside:
            for sequence, row in zip(sequences, rows, strict=True):
                if row.start < sequence.num_prompt_tokens:
                    self._waiting.release(sequence)
        return plan

    def _advance(self, sequence: Sequence, count: int) -> Row:
        """The row that computes a sequence's next `count` tokens."""
        start = sequence.num_computed_tokens
        end = sequence.num_computed_tokens = start + count
        samples = end == sequence.num_tokens
        if start < sequence.num_recompute_tokens:
            self.counters.num_recomputed_tokens += min(end, sequence.num_recompute_tokens) - start
        if samples:
            sequence.num_tokens += 1
        return Row(sequence.id, start, count, sequence.block_tables, samples)
