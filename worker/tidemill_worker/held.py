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

from tidemill.jobs import Delta, Job, JobId, Priority, TokenLogprobs
from tidemill.moves import Renewal
from tidemill_worker.engine import StepOutput
from tidemill_worker.generation import RankedToken
from tidemill_worker.held_choice import HeldChoice, Piece
from tidemill_worker.request import Ending, Request
from tidemill_worker.token_logprobs import StoredToken, TokenText, logprob_bytes

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
    token_text: TokenText
    """What a token says, for checkpoints and results that carry log-probabilities."""
    queued: float = 0.0
    """Seconds from submission to the claim, by Redis's clock."""
    deadline: float | None = None
    """When its answer becomes worthless, by the monotonic clock. The engine ends it then, or whoever
    prepares it, if it has not come so far."""
    job: Job | None = None
    """What was asked for; `None` until the payload is decoded."""
    request: Request | None = None
    """What the engine is asked for; `None` until the job is prepared."""
    num_prompt_tokens: int = 0
    ended: bool = False
    """Its result is decided; later tokens, cancellations and deadlines change nothing."""
    result_bytes: int = 0
    """About what its result takes in JSON, from its end on."""
    aside: bool = False
    """It waits for its turn to run alone; see `Isolation`."""
    alone: bool = False
    """It was begun with nothing beside it: from then on the loss of its worker counts against it."""
    cancelled: bool = False
    """Somebody cancelled it while it was aside: whoever keeps it there hands it back."""
    _begun: dict[int, HeldChoice] = field(default_factory=dict)
    _unconfirmed: list[Piece] = field(default_factory=list)

    @property
    def request_id(self) -> RequestId:
        return request_id(self.id, self.attempt)

    @property
    def choices(self) -> Sequence[HeldChoice]:
        """All generations that were asked for; one until that is known."""
        return [self.choice(index) for index in range(self.job.params.n if self.job else 1)]

    @property
    def num_open(self) -> int:
        """Generations that go on: how much of a worker the job takes. At least 1."""
        num_ended = sum(choice.ending is not None for choice in self._seen())
        return max(1, (self.job.params.n if self.job else 1) - num_ended)

    @property
    def has_news(self) -> bool:
        """Whether there is anything that no checkpoint is known to have."""
        return bool(self._unconfirmed) or any(choice.has_news for choice in self._seen())

    def choice(self, index: int) -> HeldChoice:
        """One of the generations, begun or not."""
        # One step, because a job may be cut short while another thread resumes it.
        return self._begun.get(index) or self._begun.setdefault(index, HeldChoice(index))

    def resume(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        ending: Ending | None = None,
    ) -> None:
        """Let one generation start from the checkpoint of an earlier attempt.

        Args:
            choice: which of them.
            token_ids: its tokens in the checkpoint.
            text: what they say, as far as it is safe to show; all of it if it has ended.
            logprobs: one for each token, if they were asked for.
            ending: why it is complete; `None` if it goes on.
        """
        begun = HeldChoice(choice, ending=ending)
        begun.resume(token_ids, text, [StoredToken.of(stored) for stored in logprobs])
        self._begun[choice] = begun  # as a whole: a renewal, or the job's end, may look at this very moment

    def take_in(self, output: StepOutput) -> None:
        """Add what one step brought one of the generations."""
        choice = self.choice(output.choice)
        choice.extend(output.token_ids, output.text, output.logprobs)
        if output.finish_reason is not None:
            choice.ending = Ending(output.finish_reason, output.stop_reason)
        if output.finished:
            self.end(output.prompt_logprobs or ())

    def end(self, prompt_logprobs: Sequence[RankedToken] = ()) -> None:
        """Its result is decided, and weighed before it is made: both that and Redis may take their time."""
        self.ended = True
        metadata = self.job.metadata if self.job else {}
        num_metadata_bytes = sum(len(key) + len(value) for key, value in metadata.items())
        num_choice_bytes = sum(choice.result_bytes for choice in self._seen())
        self.result_bytes = num_metadata_bytes + num_choice_bytes + logprob_bytes(prompt_logprobs)

    def seal(self, *, everything: bool = False) -> Sequence[Piece]:
        """What is to be stored next: what was given out last or, once that is known to be stored, all that
        is new.

        A piece whose fate is unknown (its reply was lost) is given out again exactly as it was, so
        that the queue can tell by its index that it has it. What is generated meanwhile waits, to
        become one piece of each generation, however long Redis is away.

        Args:
            everything: for a last word: what is new goes behind what was given out.
        """
        begun = self._seen()
        for choice in begun if everything or not self._unconfirmed else ():
            if choice.has_news:
                index = sum(one.num_sealed_tokens for one in begun)
                self._unconfirmed.append(choice.seal(index))
        return tuple(self._unconfirmed)

    def checkpoint(self, *, everything: bool = False) -> tuple[Delta, ...]:
        """The same as it is stored."""
        return tuple(piece.delta(self.token_text) for piece in self.seal(everything=everything))

    def confirm(self, deltas: Sequence[Delta]) -> None:
        """The queue has stored these."""
        self._unconfirmed = self._unconfirmed[len(deltas) :]

    def _seen(self) -> Sequence[HeldChoice]:
        """Those begun so far; `resume` may be adding to them."""
        return tuple(self._begun.values())


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
    def num_generations(self) -> int:
        """What the live jobs have to generate; a job that is not decoded yet counts for one."""
        with self._lock:
            return sum(job.num_open for job in self._jobs.values() if not job.ended)

    @property
    def num_unrecorded(self) -> int:
        """Jobs whose result is decided but not known to be recorded."""
        with self._lock:
            return sum(job.ended for job in self._jobs.values())

    @property
    def unrecorded_bytes(self) -> int:
        """About what their results take."""
        with self._lock:
            return sum(job.result_bytes for job in self._jobs.values())

    @property
    def num_aside(self) -> int:
        """Jobs that wait for their turn to run alone."""
        with self._lock:
            return sum(job.aside for job in self._jobs.values())

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
            Earlier attempts at it that were live here: their leases are gone, they have ended. Those whose
            result is still on its way are let go of too: to renew them would be answered by "lost".
        """
        with self._lock:
            others = [other for other in self._jobs.values() if other.id == job.id]
            superseded = [other for other in others if not other.ended]
            for other in others:
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
            job.end()
            return job

    def cancel(self, request_id: RequestId) -> HeldJob | None:
        """Decide that a job ends now because it was cancelled; `None` if it does not, or not by that.

        One that is aside is only marked.
        """
        with self._lock:
            job = self._jobs.get(request_id)
            if job is not None and job.aside:
                job.cancelled = True
                return None
        return self.end(request_id)

    def take_from_aside(self, request_id: RequestId) -> bool:
        """Let a job run alone; false if it was cancelled, or is held no more."""
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None or job.ended or job.cancelled:
                return False
            job.aside, job.alone = False, True
            return True

    def live_attempt(self, job_id: JobId) -> RequestId | None:
        """The attempt at a job that goes on here."""
        with self._lock:
            live = (job.request_id for job in self._jobs.values() if job.id == job_id and not job.ended)
            return next(live, None)

    def record(self, outputs: Iterable[StepOutput]) -> list[tuple[HeldJob, StepOutput]]:
        """Add a step's tokens to their jobs; outputs of jobs that have ended are dropped."""
        recorded = []
        with self._lock:
            for output in outputs:
                job = self._jobs.get(RequestId(output.request_id))
                if job is None or job.ended:
                    continue
                job.take_in(output)
                recorded.append((job, output))
        return recorded

    def renewals(self, *, everything: bool) -> list[Renewal]:
        """Renewals with checkpoints: for all jobs, or only for streamed ones that have news.

        Those that have ended are among all: until the result is recorded the lease must hold.
        """
        with self._lock:
            sealed = [
                (job, job.seal())
                for job in self._jobs.values()
                if everything or (job.stream and job.has_news and not job.ended)
            ]
        return [_renewal(job, pieces) for job, pieces in sealed]

    def live_renewals(self, *, but_alone: bool = False) -> list[Renewal]:
        """Last checkpoints of the jobs that have not ended, to hand them back with.

        Args:
            but_alone: leave out what was begun alone.
        """
        with self._lock:
            sealed = [
                (job, job.seal(everything=True))
                for job in self._jobs.values()
                if not job.ended and not (but_alone and job.alone)
            ]
        return [_renewal(job, pieces) for job, pieces in sealed]

    def confirm(self, renewals: Iterable[Renewal]) -> None:
        """The queue has stored the checkpoints of these renewals."""
        with self._lock:
            for renewal in renewals:
                job = self._jobs.get(request_id(renewal.job_id, renewal.attempt))
                if job is not None:
                    job.confirm(renewal.deltas)


def _renewal(job: HeldJob, pieces: Sequence[Piece]) -> Renewal:
    """Outside the lock: with logprobs, this takes a microsecond for each."""
    deltas = tuple(piece.delta(job.token_text) for piece in pieces)
    return Renewal(job.id, job.attempt, deltas, prompt_tokens=job.num_prompt_tokens)
