"""What goes into and comes out of a move of the queue: plain frozen values, no Redis.

The settings of a queue stand here too, because every move is shaped by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from tidemill.errors import ConfigurationError, InvalidJob, JobConflict, QueueFull
from tidemill.jobs import Delta, JobId, Priority, Status

MAX_REPLIES = 16
"""Reply names that one job can have: its result is stored once for each."""


class Submitted(StrEnum):
    """What became of an accepted submission."""

    CREATED = "created"
    """The queue had never seen this id; the job is waiting now."""
    LIVE = "live"
    """The same job is waiting, delayed or running; its result will also go to this reply name."""
    DONE = "done"
    """The same job is finished. Its result went to this reply name too, unless every copy of it
    has been acknowledged already: then there is nothing left to deliver, and it is not run again."""


SubmitOutcome = Submitted | JobConflict | QueueFull | InvalidJob
"""Refusals are values here, not raised: one bad job of a batch must not hide the others."""


class CancelOutcome(StrEnum):
    """What a cancellation did."""

    CANCELLED = "cancelled"
    """The job was not running; its one result says cancelled."""
    REQUESTED = "requested"
    """The job is running; its worker sees the request at its next renewal."""
    FINISHED = "finished"
    """A result was recorded first, and stands."""
    UNKNOWN = "unknown"
    """No such job."""


class FinishOutcome(StrEnum):
    """What became of a result that a worker wanted to record."""

    OK = "ok"
    """Recorded now."""
    ALREADY = "already"
    """Recorded before by this very holder: a repeat after a lost reply."""
    LOST = "lost"
    """The job is not this holder's any more; nothing was written."""


class JobState(StrEnum):
    """Where a job is."""

    WAITING = "waiting"
    DELAYED = "delayed"
    """Waiting out the backoff after attempts that got nowhere."""
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job that this worker holds now, under a lease, at this attempt."""

    job_id: JobId
    payload: bytes
    """The JSON of the `Job`, as submitted; not decoded yet, and possibly not decodable."""
    seed: int
    """The seed to use where the job names none; the same at every attempt."""
    attempt: int
    """The fence: rises with every claim and reclaim, never falls, and goes into every later move."""
    failures: int
    """Earlier attempts that ended with their worker lost and no progress made."""
    submitted_ms: int
    claimed_ms: int
    """When the reply was made that brought the job, by Redis's clock; a repeat has a time of its own."""
    deadline_ms: int | None
    """After this moment of Redis's clock the answer is worthless; the holder gives up by itself."""
    checkpoint: tuple[Delta, ...]
    """What earlier attempts generated, in order and without gaps; the generation goes on after it."""
    stream: bool
    """Somebody may be reading along: checkpoint text as soon as it exists."""
    alone: bool = False
    """One more failure would bury it: to be kept aside until the holder has nothing else, then announced
    with `Queue.begin`, and run with nothing beside it. Until then its lease may lapse and nothing counts."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """One held job in a `renew` or `release`, with the deltas generated since the last one.

    Raises:
        ValueError: a delta carries no token, or does not begin where the one before it ends. A
            delta's place is its first token, so one without tokens could not be told from a repeat.
    """

    job_id: JobId
    attempt: int
    deltas: tuple[Delta, ...] = ()
    prompt_tokens: int = 0
    """Of the whole prompt; 0 until it is known. Its tenant is charged for it with the first token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "deltas", tuple(self.deltas))
        expected = self.deltas[0].index if self.deltas else 0
        for delta in self.deltas:
            if not delta.token_ids:
                raise ValueError(f"job {self.job_id}: the delta at {delta.index} carries no token")
            if delta.index != expected:
                raise ValueError(f"job {self.job_id}: delta at {delta.index}, expected {expected}")
            expected += len(delta.token_ids)


@dataclass(frozen=True, slots=True)
class RenewOutcome:
    """What a worker learns of its jobs at each renewal; those in neither set go on."""

    lost: frozenset[JobId] = frozenset()
    """Not this holder's any more: stop computing, write nothing."""
    cancelled: frozenset[JobId] = frozenset()
    """Still this worker's, renewed just now or not, and to be finished as cancelled."""


@dataclass(frozen=True, slots=True)
class DeltaPage:
    """What a reader of a streamed generation got in one read."""

    deltas: tuple[Delta, ...]
    cursor: str
    """Where to read on."""
    ended: bool
    """The job has its result. Text and tokens after the last delta are in the result only."""
    restarted: bool
    """The job began anew, and no delta after that is here yet: all before it are void."""


@dataclass(frozen=True, slots=True)
class JobView:
    """One look at a job. Times are milliseconds of Redis's clock."""

    job_id: JobId
    state: JobState
    priority: Priority
    tenant: str
    attempt: int
    failures: int
    worker: str | None
    """Who holds it, or finished it."""
    cancel_requested: bool
    checkpointed_tokens: int
    submitted_ms: int
    claimed_ms: int | None
    deadline_ms: int | None
    finished_ms: int | None
    status: Status | None
    """How it ended, if it has."""
    replies: Mapping[str, str | None]
    """Reply name to the id of the result's entry in that stream, `None` until there is one."""

    @property
    def may_expire(self) -> bool:
        """Whether it has a deadline that no holder watches, so that somebody must call `expire`."""
        return self.deadline_ms is not None and self.state in (JobState.WAITING, JobState.DELAYED)


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """How much work there is, exactly, at one instant."""

    total: int
    """Jobs that want a worker now or later: `waiting` plus `delayed`."""
    waiting: int
    """Jobs in the streams that nobody holds a live lease on (expired leases count as waiting)."""
    running: int
    """Live leases."""
    delayed: int
    by_tenant: Mapping[tuple[Priority, str], int] = field(default_factory=dict)
    """Waiting jobs of each (priority, tenant) that has unfinished ones."""
    dead_letters: int = 0
    oldest_waiting: float | None = None
    """Seconds since the submission of the longest waiting job at the head of any stream."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that was given up after `max_attempts`. Its error result was delivered all the same."""

    entry_id: str
    job_id: JobId
    payload: bytes
    failures: int
    worker: str | None


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """How a queue behaves. All times in seconds.

    Raises:
        ConfigurationError: naming the setting that cannot work.
    """

    lease: float = 30.0
    """A holder that has not renewed for this long may lose the job to another worker."""
    max_attempts: int = 3
    """Attempts that may end with a lost worker and no progress before the job is a dead letter."""
    result_ttl: float = 24 * 3600.0
    """How long results, and the memory that an id was used, are kept."""
    dead_letter_ttl: float = 7 * 24 * 3600.0
    """How long a job that was given up can be looked at and requeued."""
    stream_ttl: float = 60.0
    """How long the deltas of a finished streamed job stay for readers that lag behind."""
    card_ttl: float = 90.0
    """How long a model card outlives its last publication."""
    worker_ttl: float = 15.0
    """How long a worker's report outlives its publication; after that the worker counts as gone."""
    max_payload: int = 1024 * 1024
    """Largest job, in bytes of JSON."""
    max_depth: int = 1_000_000
    """Most unfinished jobs in the queue."""
    max_tenant_depth: int | None = None
    """Most unfinished jobs of one tenant; `None` sets no limit of its own."""
    backoff: float = 1.0
    """Delay before the third attempt of a job that has made no progress; doubles from there."""
    max_backoff: float = 300.0
    memory_overdraft: float = 0.1
    """Part of the server's `maxmemory` that it may hold beyond that before jobs are held back; and that
    results of the queue may take then before none is handed out any more."""
    ageing: float = 60.0
    """Each such span of waiting lifts a job by one priority, so that `low` does not starve."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{setting.name} must be greater than 0, got {value}")
        if self.max_backoff < self.backoff:
            raise ConfigurationError(
                f"max_backoff must be at least backoff ({self.backoff}), got {self.max_backoff}"
            )
