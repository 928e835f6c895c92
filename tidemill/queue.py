"""The queue: every move of a job, each one Lua script, which is the only way its state changes.

    submit ─► waiting ─ claim ─► running ─ finish ─► done
                 ▲ ▲                │
                 │ └─── release ────┤
              delayed ◄─ reclaim ◄──┘  (lease lapsed: to another worker, delayed, or buried)

Waiting, delayed and lapsed jobs also end by cancel and by their deadline. Every move may be
repeated after a lost reply: it does its work once and says so again. The clock is Redis's.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from redis.asyncio import Redis

from tidemill import wire
from tidemill.card import ModelCard
from tidemill.dead_letters import DeadLetters, requeued
from tidemill.errors import ErrorCode
from tidemill.jobs import WIRE_VERSION, ErrorInfo, FinishReason, Job, JobId, Priority, Result, Status
from tidemill.keys import CardField, QueueKeys
from tidemill.link import Link
from tidemill.moves import (
    CancelOutcome,
    Claimed,
    DeadLetter,
    DeltaPage,
    FinishOutcome,
    JobView,
    QueueDepth,
    QueueSettings,
    Renewal,
    RenewOutcome,
    SubmitOutcome,
)
from tidemill.registry import WorkerReport, WorkerView
from tidemill.schema import QUEUE_PATTERN, check_name
from tidemill.scripts import Move
from tidemill.service import check_weight

EXPIRATIONS_PER_SCRIPT = 1000

DEFAULT_SETTINGS = QueueSettings()


class Queue:
    """One queue on one Redis server.

    Every method raises `QueueUnavailable`, with the reason, when Redis cannot serve it.

    Args:
        redis: made by `tidemill.connection.connect`; stays the caller's to close.
        name: of the queue, usually that of the model it serves.
        settings: to be the same for all who use the queue.
        wire_version: the newest version of the contract that this side understands.
        clock: monotonic seconds, for this side's memory of outages only.

    Raises:
        ConfigurationError: `name` is none; in keys and patterns of Redis it would mean something else.
    """

    def __init__(
        self,
        redis: Redis,
        name: str,
        settings: QueueSettings = DEFAULT_SETTINGS,
        *,
        wire_version: int = WIRE_VERSION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = check_name("queue", name, QUEUE_PATTERN)
        self.settings = settings
        self.keys = QueueKeys(name)
        self._link = Link(redis, self.keys.prefix, settings, clock)
        self._dead = DeadLetters(self._link, self.keys.dead)
        self._version = wire_version
        self._series = secrets.token_hex(8)
        self._answered: Counter[tuple[Move, str]] = Counter()
        self._taking = asyncio.Lock()
        self._bell = "0"

    async def aclose(self) -> None:
        """Close the connections for blocking reads, which the queue opened by itself."""
        await self._link.aclose()

    # The client's side

    async def ping(self) -> None:
        """Return if Redis answers."""
        await self._link.ping()

    async def submit(self, jobs: Sequence[Job], *, reply_to: str) -> list[SubmitOutcome]:
        """Put jobs into the queue, all in one round trip; one outcome each, in order.

        A refused job is a value, not an exception, so that it does not hide what became of the
        others.

        Args:
            jobs: of any mix of tenants and priorities.
            reply_to: where results go for jobs that do not name a stream themselves.
        """
        payloads = [job.to_wire().encode() for job in jobs]
        sent = [i for i, payload in enumerate(payloads) if len(payload) <= self.settings.max_payload]
        calls = wire.submission_calls(self._version, [(jobs[i], payloads[i]) for i in sent], reply_to)
        replies = await self._link.run(Move.SUBMIT, calls)
        answered = dict(zip(sent, chain.from_iterable(replies), strict=True))
        return [
            wire.submit_outcome(answered[i].decode(), job, self.name, self.settings)
            if i in answered
            else wire.too_large(job, len(payloads[i]), self.settings)
            for i, job in enumerate(jobs)
        ]

    async def cancel(self, job_id: JobId) -> CancelOutcome:
        """End a job that is not running, or ask the holder of a running one to end it."""
        return CancelOutcome(await self._link.text(Move.CANCEL, job_id))

    async def status(self, job_id: JobId) -> JobView | None:
        """Look at a job; `None` if there is none of that id, or none any more."""
        async with self._link.reachable():
            values = await self._link.redis.hmget(self.keys.job(job_id), list(wire.VIEW_FIELDS))
        return wire.job_view(job_id, values)

    async def result(self, job_id: JobId) -> Result | None:
        """Look up a recorded result; `None` if there is none yet, or none any more."""
        view = await self.status(job_id)
        for name, entry in view.replies.items() if view else ():
            if entry:
                async with self._link.reachable():
                    found = await self._link.redis.xrange(self.keys.results(name), entry, entry)
                if found:
                    return wire.result(*found[0])[1]
        return None

    async def depth(self) -> QueueDepth:
        """Count the queue's jobs, exactly."""
        return wire.queue_depth(await self._link.one(Move.DEPTH))

    async def model_card(self) -> ModelCard | None:
        """Return what the queue's workers serve; `None` if nobody serves it."""
        async with self._link.reachable():
            card, tokenizer = await self._link.redis.hmget(
                self.keys.card, [CardField.CARD.value, CardField.TOKENIZER.value]
            )
        if card is None:
            return None
        return ModelCard.from_wire(card).model_copy(update={"tokenizer_zlib": tokenizer or b""})

    # Readers

    async def results(
        self, name: str, cursor: str = "0", *, count: int = 100, block: float = 0.0
    ) -> list[tuple[str, Result]]:
        """Read results after `cursor`, the id of the last entry seen; at least once each.

        Waits up to `block` seconds (2 at most) for the first one. An entry that is no result is
        returned as a failed one, so that a reader gets past it.
        """
        entries = await self._link.read(self.keys.results(name), cursor, count, block)
        return [wire.result(entry, fields) for entry, fields in entries]

    async def acknowledge(self, name: str, entry_ids: Sequence[str]) -> None:
        """Free the memory of results that have been dealt with, before their time."""
        if entry_ids:
            async with self._link.reachable():
                await self._link.redis.xdel(self.keys.results(name), *entry_ids)

    async def deltas(
        self, job_id: JobId, cursor: str = "0", *, count: int = 100, block: float = 0.0
    ) -> DeltaPage:
        """Read on in a streamed generation, waiting up to `block` seconds (2 at most).

        The last piece is not among the deltas: once the page says ended, it is what the result has
        beyond them. A job that ended long ago, or whose stream flag was not set, has no deltas;
        `status` tells.
        """
        entries = await self._link.read(self.keys.deltas(job_id), cursor, count, block)
        return wire.delta_page(entries, cursor)

    # The worker's side

    async def claim(
        self, worker: str, room: int, *, above: Priority | None = None, fingerprint: str = ""
    ) -> list[Claimed]:
        """Take up to `room` waiting jobs under a lease; the last may have to run `alone`.

        If the reply to the last call was lost, this one returns the jobs of that call, even if
        `room` is smaller by now. Else it takes one at a time, or none and raises `QueueUnavailable`, while
        the server holds more memory than `memory_overdraft` allows.

        Args:
            worker: unique per process start.
            room: jobs that the worker can begin, with a small look-ahead.
            above: serve only priorities higher than this one.
            fingerprint: of this worker; a job that another one has begun begins anew.
        """
        priorities = list(Priority)
        served = priorities if above is None else priorities[: priorities.index(above)]
        if room <= 0 or not served:
            return []
        return await self._take(Move.CLAIM, worker, room, fingerprint, *(p.value for p in served))

    async def reclaim(self, worker: str, room: int, *, fingerprint: str = "") -> list[Claimed]:
        """Take up to `room` jobs whose lease has lapsed, as `claim` does; bury those that are used up.

        Takes none within one lease of a start of the server, of a change to another one, or of the end of an
        outage seen by this queue: leases ran on meanwhile, and their holders must get the time to renew.
        On a server that holds too much for them they join those that wait. What a call without a reply has
        taken is returned all the same.
        """
        if room <= 0:
            return []
        if await self._link.lately_restored():
            room = 0  # asked all the same: for what a lost reply had taken, and so that the server is known
        return await self._take(Move.RECLAIM, worker, room, fingerprint)

    async def _take(self, move: Move, worker: str, room: int, *arguments: str) -> list[Claimed]:
        async with self._taking:  # two calls under one request would be given the same jobs
            request = f"{self._series}:{self._answered[move, worker]}"
            reply = await self._link.one(move, worker, request, room, self._version, *arguments)
            taken = []
            for fields in reply:
                try:
                    taken.append(wire.claimed(fields))
                except ValueError as error:
                    await self._refuse(worker, fields, error)
            # Not before: if a refusal did not get through, the others of this reply are asked for again.
            self._answered[move, worker] += 1
        return taken

    async def _refuse(self, worker: str, fields: Sequence[Any], error: ValueError) -> None:
        """Answer a job whose record nobody can read, so that it harms none of the others."""
        job_id, attempt = wire.holding(fields)
        info = ErrorInfo(code=ErrorCode.UNDECODABLE, message=f"the job's record is damaged: {error}")
        result = Result(
            id=job_id,
            status=Status.FAILED,
            finish_reason=FinishReason.ERROR,
            attempts=attempt,
            worker=worker,
            error=info,
        )
        await self.finish(worker, attempt, result)

    async def begin(self, worker: str, job_id: JobId, attempt: int) -> bool:
        """Say that a job handed over to be run `alone` is now run; false if it is not held any more.

        From here on a lease that lapses counts as a failure, which this job has one left of.
        """
        return bool(await self._link.one(Move.BEGIN, worker, attempt, job_id))

    async def renew(self, worker: str, renewals: Sequence[Renewal]) -> RenewOutcome:
        """Extend the leases of held jobs and store what they generated, in one round trip.

        Deltas that are stored already are skipped, so a holder repeats them until it sees a reply.
        A job whose deltas do not continue its checkpoint counts as lost. Without renewals it only
        asks for cancellations, of which each call brings those of all jobs that the worker holds.
        """
        lost: set[JobId] = set()
        cancelled: set[JobId] = set()
        for reply in await self._link.run(Move.RENEW, wire.renewal_calls(worker, renewals) or [[worker]]):
            lost.update(JobId(job_id.decode()) for job_id in reply[0])
            cancelled.update(JobId(job_id.decode()) for job_id in reply[1])
        return RenewOutcome(frozenset(lost), frozenset(cancelled - lost))

    async def finish(self, worker: str, attempt: int, result: Result) -> FinishOutcome:
        """Record the one result of a held job; its usage is what the tenant is charged in the end."""
        reply = await self._link.text(Move.FINISH, *wire.finish_call(worker, attempt, result))
        return FinishOutcome(reply)

    async def release(self, worker: str, renewals: Sequence[Renewal]) -> frozenset[JobId]:
        """Store what held jobs generated and put them back at the head of the line.

        The attempt does not count as failed. Returns the jobs that were not held any more.
        """
        replies = await self._link.run(Move.RELEASE, wire.renewal_calls(worker, renewals))
        return frozenset(JobId(job_id.decode()) for reply in replies for job_id in reply)

    async def wait(self, timeout: float) -> None:
        """Return when there may be something to claim, or after `timeout` seconds (2 at most).

        Whatever was submitted after the previous call returned ends this one at once, so a worker
        that claims between its waits sleeps through nothing.
        """
        for entry, _ in await self._link.read(self.keys.doorbell, self._bell, 1, timeout):
            self._bell = entry

    async def publish_card(self, card: ModelCard) -> None:
        """Say what is served here; to be repeated well within `card_ttl`."""
        key, text = self.keys.card, card.to_wire()
        ttl = wire.milliseconds(self.settings.card_ttl)
        async with self._link.reachable():
            pipeline = self._link.redis.pipeline(transaction=True)
            if await self._link.redis.hget(key, CardField.CARD.value) != text.encode():
                pipeline.hset(key, CardField.CARD.value, text)
                pipeline.hset(key, CardField.TOKENIZER.value, card.tokenizer_zlib)
            pipeline.pexpire(key, ttl)
            await pipeline.execute()

    async def report(self, report: WorkerReport) -> None:
        """List a worker in the registry; to be repeated well within `worker_ttl`."""
        await self._link.one(Move.HEARTBEAT, report.name, report.to_wire())

    async def remove_consumer(self, worker: str) -> bool:
        """Forget a worker that has stopped; false, and nothing lost, if it still holds jobs."""
        return bool(await self._link.one(Move.REMOVE_CONSUMER, worker))

    # Operators

    async def expire(self) -> int:
        """Answer waiting jobs whose deadline has passed (claim does it too); return how many."""
        return int(await self._link.one(Move.EXPIRE, EXPIRATIONS_PER_SCRIPT))

    async def workers(self) -> list[WorkerView]:
        """List the workers that reported lately, by name."""
        return wire.worker_views(await self._link.one(Move.WORKERS))

    async def dead_letters(self, cursor: str = "0", *, count: int = 100) -> list[DeadLetter]:
        """Read the jobs that were given up, after the entry `cursor`."""
        return await self._dead.after(cursor, count)

    async def dead_letter(self, job_id_or_entry: str) -> DeadLetter | None:
        """Look up a job that was given up, by its entry or its own id; the newest, if there are several."""
        return await self._dead.find(job_id_or_entry)

    async def purge_dead_letters(self, entry_ids: Sequence[str] | None) -> int:
        """Forget the dead letters of these entries, or all (`None`); returns how many there were.

        Raises:
            ValueError: naming what is not the id of an entry.
        """
        return await self._dead.purge(entry_ids)

    async def requeue(self, letter: DeadLetter, *, reply_to: str) -> JobId:
        """Submit a dead letter's job again under a new id, with `requeued_from` in its metadata.

        The new id follows from the letter, so a repeat is the same job.

        Raises:
            InvalidJob: the payload is not a job, or has no room for one more metadata entry.
            QueueFull: the letter stays where it is.
        """
        job = requeued(letter)
        (outcome,) = await self.submit([job], reply_to=reply_to)
        if isinstance(outcome, Exception):
            raise outcome
        await self._dead.purge([letter.entry_id])
        return job.id

    async def set_weight(self, tenant: str, weight: float) -> None:
        """Serve this tenant `weight` tokens for each of a tenant of weight 1, while both have jobs waiting.

        Holds for what is served from now on. Tokens of prompts count half of generated ones.

        Raises:
            ValueError: the weight is not from `MIN_WEIGHT` to `MAX_WEIGHT`.
        """
        check_weight(weight)
        async with self._link.reachable():
            await self._link.redis.hset(self.keys.weights, tenant, str(weight))
