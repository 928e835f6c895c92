"""Any sequence of moves by several clients and workers keeps the books balanced and answers once."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.tidemill.account_book import WEIGHTS, AccountBook
from tests.tidemill.audit import Audit
from tests.tidemill.factories import make_deltas, make_job, make_result, make_settings, text_of, timeless
from tests.tidemill.servers import Server
from tidemill.connection import connect
from tidemill.errors import JobConflict
from tidemill.jobs import Delta, JobId, Usage
from tidemill.moves import CancelOutcome, Claimed, FinishOutcome, JobState, Renewal, Submitted
from tidemill.queue import Queue
from tidemill.scripts import Move

IDS = st.sampled_from([JobId(name) for name in "abcdef"])
WORKERS = st.sampled_from(["w1", "w2", "w3"])
NAMES = st.sampled_from(["r1", "r2"])
PRIORITIES = st.sampled_from(["high", "normal", "low"])
TENANTS = st.sampled_from(["t1", "t2"])
PROMPT = 5
PROMPTS = st.sampled_from([0, PROMPT])
"""Reported by a holder that does not know the prompt yet, and by one that does."""


class QueueMachine(RuleBasedStateMachine):
    """Knows who should hold which job, what it has checkpointed and cost, and how often it was answered."""

    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = connect(self.server.url)
        self.queue = Queue(self.redis, f"machine-{uuid.uuid4().hex[:12]}", make_settings(lease=600.0))
        # Reclaims ask how old the server is against their own lease; what they take is renewed at once.
        self.impatient = Queue(self.redis, self.queue.name, make_settings(lease=2.0))
        self.sync = self.server.client()
        self.submitted: set[JobId] = set()
        self.names: dict[JobId, set[str]] = {}
        self.holders: dict[JobId, tuple[str, Claimed]] = {}
        self.past: list[tuple[str, Claimed]] = []
        self.tokens: Counter[JobId] = Counter()
        self.accounts = AccountBook(self.sync, self.queue)
        self.do(self.queue.set_weight("t2", WEIGHTS["t2"]))

    def do(self, move: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(move)

    def state(self, job_id: JobId) -> JobState | None:
        view = self.do(self.queue.status(job_id))
        return view.state if view else None

    # clients

    @rule(job_id=IDS, name=NAMES, priority=PRIORITIES, tenant=TENANTS, deadline=st.sampled_from([None, 1000]))
    def submit(self, job_id: JobId, name: str, priority: str, tenant: str, deadline: float | None) -> None:
        job = make_job(job_id, priority=priority, tenant=tenant, deadline=deadline, stream=priority == "high")
        before = self.state(job_id)
        (outcome,) = self.do(self.queue.submit([job], reply_to=name))
        expected = {None: Submitted.CREATED, JobState.DONE: Submitted.DONE}.get(before, Submitted.LIVE)
        assert outcome is expected
        if outcome is Submitted.CREATED:
            self.accounts.open(job_id, priority, tenant)
        self.submitted.add(job_id)
        self.names.setdefault(job_id, set()).add(name)

    @rule(job_id=IDS)
    def submit_other_content(self, job_id: JobId) -> None:
        if job_id in self.submitted:
            (outcome,) = self.do(self.queue.submit([make_job(job_id, prompt="other")], reply_to="thief"))
            assert isinstance(outcome, JobConflict)

    @rule(job_id=IDS)
    def cancel(self, job_id: JobId) -> None:
        before = self.state(job_id)
        outcome = self.do(self.queue.cancel(job_id))
        if before is None:
            assert outcome is CancelOutcome.UNKNOWN
        elif before is JobState.DONE:
            assert outcome in (CancelOutcome.FINISHED, CancelOutcome.CANCELLED)
        elif before is not JobState.RUNNING:
            assert outcome is CancelOutcome.CANCELLED
        if outcome is CancelOutcome.CANCELLED:
            self.drop(job_id)

    # workers

    @rule(worker=WORKERS, room=st.integers(1, 4))
    def claim(self, worker: str, room: int) -> None:
        claimed = self.do(self.queue.claim(worker, room))
        assert len(claimed) <= room
        for job in claimed:
            assert job.job_id not in self.holders
        self.take(worker, claimed)

    @rule(worker=WORKERS, room=st.integers(1, 4))
    def claim_after_a_lost_reply(self, worker: str, room: int) -> None:
        lost = self.do(self.queue.claim(worker, room))
        self.queue._answered[Move.CLAIM, worker] -= 1
        found = self.do(self.queue.claim(worker, room))
        assert timeless(found) == timeless(lost)
        self.take(worker, found)

    @rule(worker=WORKERS, room=st.integers(1, 4))
    def reclaim(self, worker: str, room: int) -> None:
        claimed = self.do(self.impatient.reclaim(worker, room))
        for job in claimed:
            assert job.attempt == self.holders[job.job_id][1].attempt + 1
        self.take(worker, claimed)
        for job_id in list(self.holders):
            if self.state(job_id) is not JobState.RUNNING:
                self.drop(job_id)
        outcome = self.do(self.queue.renew(worker, [Renewal(job.job_id, job.attempt) for job in claimed]))
        assert not outcome.lost

    def take(self, worker: str, claimed: list[Claimed]) -> None:
        for job in claimed:
            assert self.text(job.checkpoint) == text_of(0, self.tokens[job.job_id])
            self.drop(job.job_id)
            self.holders[job.job_id] = (worker, job)

    def text(self, deltas: tuple[Delta, ...]) -> str:
        return "".join(delta.text for delta in deltas)

    def drop(self, job_id: JobId) -> None:
        if job_id in self.holders:
            self.past.append(self.holders.pop(job_id))

    def holdings(self) -> list[tuple[str, Claimed]]:
        return [*self.holders.values(), *self.past]

    def holds(self, worker: str, job: Claimed) -> bool:
        return self.holders.get(job.job_id) == (worker, job)

    @precondition(lambda self: self.holders or self.past)
    @rule(
        data=st.data(), sizes=st.lists(st.integers(1, 3), max_size=3), times=st.integers(1, 2), prompt=PROMPTS
    )
    def renew(self, data: st.DataObject, sizes: list[int], times: int, prompt: int) -> None:
        worker, job = data.draw(st.sampled_from(self.holdings()))
        start = self.tokens[job.job_id]
        renewal = Renewal(job.job_id, job.attempt, make_deltas(*sizes, start=start), prompt)
        held = self.holds(worker, job)
        for _ in range(times):
            outcome = self.do(self.queue.renew(worker, [renewal]))
            assert (job.job_id in outcome.lost) is not held
        if held:
            self.checkpointed(job.job_id, sum(sizes), prompt)

    def checkpointed(self, job_id: JobId, size: int, prompt: int) -> None:
        self.tokens[job_id] += size
        if self.tokens[job_id]:
            self.accounts.serve(job_id, prompt + 2 * self.tokens[job_id])

    @precondition(lambda self: self.holders or self.past)
    @rule(data=st.data(), times=st.integers(1, 2), size=st.integers(0, 3))
    def finish(self, data: st.DataObject, times: int, size: int) -> None:
        worker, job = data.draw(st.sampled_from(self.holdings()))
        usage = Usage(prompt_tokens=PROMPT, completion_tokens=self.tokens[job.job_id] + size)
        result = make_result(job.job_id, f"by {worker} at {job.attempt}", usage=usage)
        held = self.holds(worker, job)
        outcome = self.do(self.queue.finish(worker, job.attempt, result))
        if held:
            assert outcome is FinishOutcome.OK
            self.accounts.serve(job.job_id, PROMPT + 2 * usage.completion_tokens)
            self.drop(job.job_id)
        else:
            assert outcome is not FinishOutcome.OK
        for _ in range(times - 1):
            assert self.do(self.queue.finish(worker, job.attempt, result)) is (
                FinishOutcome.ALREADY if held else outcome
            )

    @precondition(lambda self: self.holders or self.past)
    @rule(data=st.data(), size=st.integers(0, 2), prompt=PROMPTS)
    def release(self, data: st.DataObject, size: int, prompt: int) -> None:
        worker, job = data.draw(st.sampled_from(self.holdings()))
        sizes = [size] if size else []
        deltas = make_deltas(*sizes, start=self.tokens[job.job_id])
        renewal = Renewal(job.job_id, job.attempt, deltas, prompt)
        held = self.holds(worker, job)
        lost = self.do(self.queue.release(worker, [renewal]))
        if held:
            assert not lost
            self.checkpointed(job.job_id, size, prompt)
            self.drop(job.job_id)

    @rule(worker=WORKERS)
    def remove_consumer(self, worker: str) -> None:
        holding = any(holder == worker for holder, _ in self.holders.values())
        assert self.do(self.queue.remove_consumer(worker)) is not holding

    # time and misfortune

    @rule(job_id=IDS)
    def lapse(self, job_id: JobId) -> None:
        self.sync.zadd(self.queue.keys.leases, {job_id: 1}, xx=True)

    @rule(job_id=IDS)
    def backoff_ends(self, job_id: JobId) -> None:
        self.sync.zadd(self.queue.keys.delayed, {job_id: 1}, xx=True)

    @rule(job_id=IDS)
    def deadline_passes(self, job_id: JobId) -> None:
        if self.sync.zadd(self.queue.keys.deadlines, {job_id: 1}, xx=True, ch=True):
            self.sync.hset(self.queue.keys.job(job_id), "deadline", "1")
            self.do(self.queue.expire())
            assert self.state(job_id) is JobState.DONE

    @rule()
    def scripts_are_flushed(self) -> None:
        self.sync.script_flush()

    # what must hold

    @invariant()
    def books_balance(self) -> None:
        assert Audit(self.sync, self.queue.keys.prefix).run() == []

    @invariant()
    def every_charge_is_exact(self) -> None:
        self.accounts.check()

    @invariant()
    def depth_is_exact(self) -> None:
        states = Counter(self.state(job_id) for job_id in self.submitted)
        depth = self.do(self.queue.depth())
        assert depth.total + depth.running == sum(states.values()) - states[JobState.DONE]
        assert depth.delayed == states[JobState.DELAYED]
        assert depth.running <= states[JobState.RUNNING] == len(self.holders)

    @invariant()
    def one_result_each(self) -> None:
        for name in ("r1", "r2", "thief", "default"):
            found = Counter(result.id for _, result in self.do(self.queue.results(name, count=1000)))
            done = {
                job_id
                for job_id in self.submitted
                if name in self.names[job_id] and self.state(job_id) is JobState.DONE
            }
            assert found == Counter(done)

    def teardown(self) -> None:
        for _ in range(6):
            for job_id in self.submitted:
                self.lapse(job_id)
                self.backoff_ends(job_id)
            for job in self.do(self.impatient.reclaim("last", 10)) + self.do(self.queue.claim("last", 10)):
                self.do(self.queue.finish("last", job.attempt, make_result(job.job_id)))
        assert {self.state(job_id) for job_id in self.submitted} <= {JobState.DONE}
        self.one_result_each()
        self.books_balance()
        self.close()

    def close(self) -> None:
        keys = list(self.sync.scan_iter(f"{self.queue.keys.prefix}*", count=1000))
        if keys:
            self.sync.delete(*keys)
        self.sync.close()
        self.do(self.redis.aclose())
        self.runner.close()


@contextmanager
def machine_on(server: Server) -> Iterator[type[QueueMachine]]:
    yield type("QueueMachineOnServer", (QueueMachine,), {"server": server})


@pytest.mark.timeout(120)
def test_any_sequence_of_moves_keeps_every_promise(valkey: Server) -> None:
    with machine_on(valkey) as machine:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=40,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
