"""The jobs this worker holds a lease on, and how far each has come.

Three threads meet here: the engine's adds tokens, the lease keeper's takes checkpoints, and the
I/O loop's takes jobs in and lets them go. Every method holds the one lock for microseconds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NewType

from tidemill.jobs import Delta, Job, JobId, Priority
from tidemill.moves import Renewal
from tidemill_worker.engine import StepOutput

RequestId = NewType("RequestId", str)
"""One attempt at one job: what the engine knows it by. A job that was lost and then claimed again
by the same worker is another request, so that nothing of the old one can reach the new one."""


def request_id(job_id: JobId, attempt: int) -> RequestId:
    """The id of this attempt at this job."""
    return RequestId(f"{job_id}/{attempt}")


@dataclass(eq=False)
class HeldJob:
    """One claimed job, from its claim until its result is recorded or its lease is gone."""

    id: JobId
    attempt: int
    stream: bool
    claimed: float
    """When it was claimed, in seconds of this process's monotonic clock."""
    queued: float = 0.0
    """Seconds from submission to the claim, by Redis's clock."""
    deadline: float | None = None
    """When its answer becomes worthless, by the monotonic clock."""
    job: Job | None = None
    """What was asked for; `None` until the payload is decoded."""
    num_prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Everything generated so far, in earlier attempts too."""
    last_token: float | None = None
    ended: bool = False
    """Its result is decided; later tokens, cancellations and deadlines change nothing."""
    _texts: list[str] = field(default_factory=list)
    _num_sealed_tokens: int = 0
    _num_sealed_texts: int = 0
    _unconfirmed: list[Delta] = field(default_factory=list)

    @property
    def request_id(self) -> RequestId:
        return request_id(self.id, self.attempt)

    @property
    def text(self) -> str:
        """The text of `token_ids` that is safe to show."""
        return "".join(self._texts)

    @property
    def has_news(self) -> bool:
        """Whether there is anything that no checkpoint has yet."""
        return bool(self._unconfirmed) or self._num_sealed_tokens < len(self.token_ids)

    def resume(self, token_ids: Iterable[int], text: str) -> None:
        """Start from the checkpoint of an earlier attempt, which is stored already."""
        # Counted before they are there: a renewal at this very moment must not send them again.
        stored = list(token_ids)
        self._num_sealed_tokens = len(stored)
        self._num_sealed_texts = 1 if text else 0
        self.extend(stored, text)

    def extend(self, token_ids: Iterable[int], text: str) -> None:
        """Add what one step brought."""
        self.token_ids.extend(token_ids)
        if text:
            self._texts.append(text)

    def checkpoint(self) -> tuple[Delta, ...]:
        """Everything not known to be stored.

        A delta whose fate is unknown (its reply was lost) is given out again exactly as it was, so
        that the queue can tell by its index that it has it.
        """
        token_ids = self.token_ids[self._num_sealed_tokens :]
        if token_ids:
            text = "".join(self._texts[self._num_sealed_texts :])
            self._unconfirmed.append(
                Delta(index=self._num_sealed_tokens, text=text, token_ids=tuple(token_ids))
            )
            self._num_sealed_tokens = len(self.token_ids)
            self._num_sealed_texts = len(self._texts)
        return tuple(self._unconfirmed)

    def confirm(self, deltas: Sequence[Delta]) -> None:
        """The queue has stored these."""
        self._unconfirmed = self._unconfirmed[len(deltas) :]


class HeldJobs:
    """All of them, safe to use from any thread."""

    def __init__(self) -> None:
        self._jobs: dict[RequestId, HeldJob] = {}
        self._lock = threading.Lock()

    @property
    def num_live(self) -> int:
        """Jobs whose result is not decided yet."""
        with self._lock:
            return sum(not job.ended for job in self._jobs.values())

    @property
    def num_unrecorded(self) -> int:
        """Jobs whose result is decided but not known to be recorded."""
        with self._lock:
            return sum(job.ended for job in self._jobs.values())

    @property
    def num_by_priority(self) -> Counter[Priority]:
        """Jobs whose result is not decided yet and that could be decoded, by priority."""
        with self._lock:
            return Counter(job.job.priority for job in self._jobs.values() if job.job and not job.ended)

    def __len__(self) -> int:
        return len(self._jobs)

    def hold(self, job: HeldJob) -> list[HeldJob]:
        """Take responsibility for a job just claimed; its lease is renewed from now on.

        Returns:
            Earlier attempts at it that were live here: their leases are gone, they have ended.
        """
        with self._lock:
            superseded = [other for other in self._jobs.values() if other.id == job.id and not other.ended]
            for other in superseded:
                other.ended = True
                del self._jobs[other.request_id]
            self._jobs[job.request_id] = job
            return superseded

    def forget(self, request_id: RequestId) -> None:
        """Let go of a job: its result is recorded, or its lease is another's."""
        with self._lock:
            self._jobs.pop(request_id, None)

    def end(self, request_id: RequestId) -> HeldJob | None:
        """Decide that the job ends now; `None` if that was decided before, or it is not held."""
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None or job.ended:
                return None
            job.ended = True
            return job

    def record(self, outputs: Iterable[StepOutput]) -> list[tuple[HeldJob, StepOutput]]:
        """Add a step's tokens to their jobs; outputs of jobs that have ended are dropped."""
        recorded = []
        with self._lock:
            for output in outputs:
                job = self._jobs.get(RequestId(output.request_id))
                if job is None or job.ended:
                    continue
                job.extend(output.token_ids, output.text)
                job.ended = output.finished
                recorded.append((job, output))
        return recorded

    def renewals(self, *, everything: bool) -> list[Renewal]:
        """Renewals with checkpoints: for all jobs, or only for streamed ones that have news.

        Those that have ended are among all: until the result is recorded the lease must hold.
        """
        with self._lock:
            return [
                _renewal(job)
                for job in self._jobs.values()
                if everything or (job.stream and job.has_news and not job.ended)
            ]

    def live_renewals(self) -> list[Renewal]:
        """Last checkpoints of the jobs that have not ended, to hand them back with."""
        with self._lock:
            return [_renewal(job) for job in self._jobs.values() if not job.ended]

    def confirm(self, renewals: Iterable[Renewal]) -> None:
        """The queue has stored the checkpoints of these renewals."""
        with self._lock:
            for renewal in renewals:
                job = self._jobs.get(request_id(renewal.job_id, renewal.attempt))
                if job is not None:
                    job.confirm(renewal.deltas)

    def overdue(self, now: float) -> list[RequestId]:
        """Jobs still running whose deadline has passed."""
        with self._lock:
            return [
                job.request_id
                for job in self._jobs.values()
                if job.deadline is not None and job.deadline <= now and not job.ended
            ]


def _renewal(job: HeldJob) -> Renewal:
    return Renewal(job_id=job.id, attempt=job.attempt, deltas=job.checkpoint())
