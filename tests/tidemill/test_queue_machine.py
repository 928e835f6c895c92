"""Any sequence of moves by several clients and workers keeps the books balanced and answers once."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.tidemill.account_book import WEIGHTS, AccountBook
from tests.tidemill.attempt_book import Attempts, Reader
from tests.tidemill.audit import Audit
from tests.tidemill.factories import (
    make_deltas,
    make_job,
    make_report,
    make_result,
    make_settings,
    sibling,
    text_of,
    timeless,
)
from tests.tidemill.servers import Server
from tidemill.connection import connect
from tidemill.errors import JobConflict
from tidemill.jobs import JobId, Usage
from tidemill.moves import CancelOutcome, Claimed, FinishOutcome, JobState, Renewal, RenewOutcome, Submitted
from tidemill.queue import Queue
from tidemill.scripts import Move

IDS = st.sampled_from([JobId(name) for name in "abcdef"])
WORKERS = st.sampled_from(["w1", "w2", "w3"])
NAMES = st.sampled_from(["r1", "r2"])
PRIORITIES = st.sampled_from(["high", "normal", "low"])
DEADLINES = st.sampled_from([None, 1000])
TENANTS = st.sampled_from(["t1", "t2"])
BUILDS = st.sampled_from(["build-1", "build-2"])
ALLOWED = st.sampled_from([2, 3])  # attempts; workers may differ in that
PROMPT = 5
PROMPTS = st.sampled_from([0, PROMPT])
"""Reported by a holder that does not know the prompt yet, and by one that does."""


class QueueMachine(RuleBasedStateMachine):
    """Knows who should hold which job, what it has checkpointed and cost, how often it has failed and was
    answered, and who should have heard of what."""

    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = connect(self.server.url)
        patient = make_settings(lease=600.0, worker_ttl=600.0)
        self.queue = Queue(self.redis, f"machine-{uuid.uuid4().hex[:12]}", patient)
        # Reclaims ask how old the server is against their own lease; what they take is renewed at once.
        self.impatient = {n: sibling(self.queue, self.redis, lease=2.0, max_attempts=n) for n in (2, 3)}
        self.patient = {n: sibling(self.queue, self.redis, max_attempts=n) for n in (2, 3)}
        self.sync = self.server.client()
        self.submitted: set[JobId] = set()
        self.names: dict[JobId, set[str]] = {}
        self.holders: dict[JobId, tuple[str, Claimed]] = {}
        self.past: list[tuple[str, Claimed]] = []
        self.attempts = defaultdict[JobId, Attempts](Attempts)
        self.readers: dict[JobId, Reader] = {}
        self.asked: defaultdict[str, set[JobId]] = defaultdict(set)
        self.reported: set[str] = set()
        self.accounts = AccountBook(self.sync, self.queue)
        self.do(self.queue.set_weight("t2", WEIGHTS["t2"]))

    def do(self, move: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(move)

    def state(self, job_id: JobId) -> JobState | None:
        found = self.sync.hget(self.queue.keys.job(job_id), "state")
        return JobState(found.decode()) if found else None

    # clients

    @initialize(data=st.data())
    def submit_all(self, data: st.DataObject) -> None:
        """Else most runs would be about moves that find nothing to do."""
        for job_id in data.draw(st.lists(IDS, unique=True, min_size=3)):
            self.submit(job_id, *(data.draw(kind) for kind in (NAMES, PRIORITIES, TENANTS, DEADLINES)))

    @rule(job_id=IDS, name=NAMES, priority=PRIORITIES, tenant=TENANTS, deadline=DEADLINES)
    def submit(self, job_id: JobId, name: str, priority: str, tenant: str, deadline: float | None) -> None:
        job = make_job(job_id, priority=priority, tenant=tenant, deadline=deadline, stream=priority == "high")
        before = self.state(job_id)
        (outcome,) = self.do(self.queue.submit([job], reply_to=name))
        expected = {None: Submitted.CREATED, JobState.DONE: Submitted.DONE}.get(before, Submitted.LIVE)
        assert outcome is expected
        if outcome is Submitted.CREATED:
            self.accounts.open(job_id, priority, tenant)
            if job.stream:
                self.readers[job_id] = Reader()
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
        if outcome is CancelOutcome.REQUESTED:
            self.asked[self.holders[job_id][0]].add(job_id)
        if outcome is CancelOutcome.CANCELLED:
            self.drop(job_id)

    # workers

    @rule(worker=WORKERS, room=st.integers(1, 4), build=BUILDS, allowed=ALLOWED)
    def claim(self, worker: str, room: int, build: str, allowed: int) -> None:
        claimed = self.do(self.patient[allowed].claim(worker, room, fingerprint=build))
        assert len(claimed) <= room
        assert not {job.job_id for job in claimed} & self.holders.keys()
        self.take(worker, claimed, build, allowed)

    @rule(worker=WORKERS, room=st.integers(1, 4), build=BUILDS)
    def claim_after_a_lost_reply(self, worker: str, room: int, build: str) -> None:
        lost = self.do(self.queue.claim(worker, room, fingerprint=build))
        self.queue._answered[Move.CLAIM, worker] -= 1
        found = self.do(self.queue.claim(worker, room, fingerprint=build))
        assert timeless(found) == timeless(lost)
        self.take(worker, found, build, self.queue.settings.max_attempts)

    @rule(worker=WORKERS, room=st.integers(1, 4), build=BUILDS, allowed=ALLOWED)
    def reclaim(self, worker: str, room: int, build: str, allowed: int) -> None:
        claimed = self.do(self.impatient[allowed].reclaim(worker, room, fingerprint=build))
        taken = {job.job_id: job for job in claimed}
        for job_id, (_, before) in list(self.holders.items()):
            if job_id in taken:
                assert taken[job_id].attempt == before.attempt + 1
            if job_id in taken or self.state(job_id) is not JobState.RUNNING:
                if self.sync.hget(self.queue.keys.job(job_id), "status") != b"cancelled":
                    self.attempts[job_id].lapse(build)
                self.drop(job_id)
        self.take(worker, claimed, build, allowed)
        assert not self.renewed(worker, [Renewal(job.job_id, job.attempt) for job in claimed]).lost

    def take(self, worker: str, claimed: list[Claimed], build: str, allowed: int) -> None:
        for job in claimed:
            self.attempts[job.job_id].hand_over(job, build, allowed)
            self.holders[job.job_id] = (worker, job)
        assert not any(job.alone for job in claimed[:-1])

    def renewed(self, worker: str, renewals: list[Renewal]) -> RenewOutcome:
        """Renew, and hear of each cancellation that was not heard of yet."""
        held = {job_id for job_id, (holder, _) in self.holders.items() if holder == worker}
        outcome: RenewOutcome = self.do(self.queue.renew(worker, renewals))
        asked, kept = self.asked.pop(worker, set()), held - outcome.lost
        assert asked & kept <= outcome.cancelled <= kept
        return outcome

    @rule(worker=WORKERS)
    def ask_for_cancellations(self, worker: str) -> None:
        self.renewed(worker, [])
        assert self.renewed(worker, []) == RenewOutcome()

    @precondition(lambda self: self.holders or self.past)
    @rule(data=st.data(), times=st.integers(1, 2))
    def begin(self, data: st.DataObject, times: int) -> None:
        worker, job = data.draw(st.sampled_from(self.holdings()))
        held = self.holds(worker, job)
        for _ in range(times):
            assert self.do(self.queue.begin(worker, job.job_id, job.attempt)) is held
        if held:
            self.attempts[job.job_id].begin()

    def drop(self, job_id: JobId) -> None:
        if job_id in self.holders:
            self.past.append(self.holders.pop(job_id))

    def holdings(self) -> list[tuple[str, Claimed]]:
        """Whoever may try to do something with a job, rightly or wrongly."""
        return [*self.holders.values(), *self.past[-2:]]

    def holds(self, worker: str, job: Claimed) -> bool:
        return self.holders.get(job.job_id) == (worker, job)

    @precondition(lambda self: self.holders or self.past)
    @rule(
        data=st.data(), sizes=st.lists(st.integers(1, 3), max_size=3), times=st.integers(1, 2), prompt=PROMPTS
    )
    def renew(self, data: st.DataObject, sizes: list[int], times: int, prompt: int) -> None:
        worker, job = data.draw(st.sampled_from(self.holdings()))
        self.report_progress(worker, job, sizes, prompt, times)

    def report_progress(
        self, worker: str, job: Claimed, sizes: list[int], prompt: int, times: int = 1
    ) -> None:
        start = self.attempts[job.job_id].tokens
        renewal = Renewal(job.job_id, job.attempt, make_deltas(*sizes, start=start), prompt)
        held = self.holds(worker, job)
        for _ in range(times):
            outcome = self.renewed(worker, [renewal])
            assert (job.job_id in outcome.lost) is not held
        if held:
            self.checkpointed(job.job_id, sum(sizes), prompt)

    def checkpointed(self, job_id: JobId, size: int, prompt: int) -> None:
        self.attempts[job_id].tokens += size
        if tokens := self.attempts[job_id].tokens:
            self.accounts.serve(job_id, prompt + 2 * tokens)

    @precondition(lambda self: self.holders or self.past)
    @rule(data=st.data(), times=st.integers(1, 2), size=st.integers(0, 3))
    def finish(self, data: st.DataObject, times: int, size: int) -> None:
        worker, job = data.draw(st.sampled_from(self.holdings()))
        usage = Usage(prompt_tokens=PROMPT, completion_tokens=self.attempts[job.job_id].tokens + size)
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
        deltas = make_deltas(*sizes, start=self.attempts[job.job_id].tokens)
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
        if not holding:
            self.reported.discard(worker)

    @rule(worker=WORKERS)
    def heartbeat(self, worker: str) -> None:
        self.do(self.queue.report(make_report(worker)))
        self.reported.add(worker)

    # time and misfortune

    @rule(job_id=IDS)
    def lapse(self, job_id: JobId) -> None:
        self.sync.zadd(self.queue.keys.leases, {job_id: 1}, xx=True)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), size=st.integers(0, 2), heir=WORKERS, build=BUILDS, allowed=ALLOWED)
    def die(self, data: st.DataObject, size: int, heir: str, build: str, allowed: int) -> None:
        """A worker is gone with all it held, with or without any progress, and another one finds that."""
        worker, _ = data.draw(st.sampled_from(list(self.holders.values())))
        for job in [job for holder, job in self.holders.values() if holder == worker]:
            if size:
                self.report_progress(worker, job, [size], 0)
            self.lapse(job.job_id)
        self.reclaim(heir, 4, build, allowed)

    @rule(job_id=IDS)
    def fail_often(self, job_id: JobId) -> None:
        """A job has brought down as many workers as it may, less one."""
        if self.state(job_id) not in (None, JobState.DONE):
            failures = self.attempts[job_id].failures = self.queue.settings.max_attempts - 1
            self.sync.hset(self.queue.keys.job(job_id), "failures", str(failures))

    @rule()
    def backoff_ends(self) -> None:
        for job_id in self.submitted:
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
    def the_dead_are_those_that_failed_too_often(self) -> None:
        buried = Counter(fields[b"id"].decode() for _, fields in self.sync.xrange(self.queue.keys.dead))
        assert buried == Counter(job for job, attempts in self.attempts.items() if attempts.are_used_up)

    @invariant()
    def every_charge_is_exact(self) -> None:
        self.accounts.check()

    @invariant()
    def readers_have_the_present_generation(self) -> None:
        """Whatever was void is forgotten as soon as there is anything that is not."""
        for job_id, reader in self.readers.items():
            if self.state(job_id) is JobState.DONE:
                continue
            while reader.take(self.do(self.queue.deltas(job_id, reader.cursor, count=1))):
                pass
            if tokens := self.attempts[job_id].tokens:
                assert reader.text == text_of(0, tokens)

    @invariant()
    def who_reported_is_listed(self) -> None:
        assert [view.report.name for view in self.do(self.queue.workers())] == sorted(self.reported)

    @invariant()
    def depth_is_exact(self) -> None:
        states = Counter(map(self.state, self.submitted))
        depth = self.do(self.queue.depth())
        assert depth.total + depth.running == sum(states.values()) - states[JobState.DONE]
        assert depth.delayed == states[JobState.DELAYED]
        assert depth.running <= states[JobState.RUNNING] == len(self.holders)

    @invariant()
    def one_result_each(self) -> None:
        done = {job_id for job_id in self.submitted if self.state(job_id) is JobState.DONE}
        for name in ("r1", "r2", "thief", "default"):
            found = Counter(result.id for _, result in self.do(self.queue.results(name, count=1000)))
            assert found == Counter(job_id for job_id in done if name in self.names[job_id])

    def teardown(self) -> None:
        for _ in range(6):
            for job_id in self.submitted:
                self.lapse(job_id)
            self.backoff_ends()
            for job in self.do(self.impatient[3].reclaim("last", 10)) + self.do(self.queue.claim("last", 10)):
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
