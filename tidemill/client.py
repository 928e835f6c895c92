"""The SDK: put jobs in a queue and get their results.

    async with Client("redis://127.0.0.1:6379/0", queue="smollm2") as client:
        job_id = await client.submit(Job(prompt="Once upon a time"))
        print((await client.result(job_id)).text)

`BlockingClient` has the same methods for code without an event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tidemill.answers import RecordedAnswers, unknown
from tidemill.card import ModelCard
from tidemill.completion import Completion
from tidemill.connection import MAX_CONNECTIONS, connect
from tidemill.errors import ConfigurationError, JobUnknown, TidemillError
from tidemill.inbox import Answer, Inbox, Watch
from tidemill.jobs import Delta, Job, JobId, Result
from tidemill.moves import (
    CancelOutcome,
    DeadLetter,
    JobView,
    QueueDepth,
    QueueSettings,
    Submitted,
)
from tidemill.patience import Patience
from tidemill.queue import Queue
from tidemill.registry import WorkerView
from tidemill.schema import NAME_PATTERN, check_name
from tidemill.streaming import DeltaReader
from tidemill.submission import BATCH, OnError, Outcome, Submission, abatched, accepted

DEFAULT_URL = "redis://127.0.0.1:6379/0"
DEAD_LETTER_COUNT = 20
"""Dead letters in one reply; each may carry as much as a job may."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How a client behaves.

    Raises:
        ConfigurationError: naming the setting that cannot work.
    """

    queue: QueueSettings = field(default_factory=QueueSettings)
    """Must agree with those of the other clients and of the workers."""
    max_connections: int = MAX_CONNECTIONS
    """Connections for commands; those of blocking reads are not among them."""
    window: int = 1000
    """Jobs that one `as_completed` waits for at a time, and so the most answers that it holds for a slow
    consumer."""
    patience: float = 30.0
    """Seconds that Redis may be away before those who wait for a result or room, or read along, are told."""

    def __post_init__(self) -> None:
        for name in ("max_connections", "window"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.patience < 0:
            raise ConfigurationError(f"patience must be at least 0 s, got {self.patience}")


class Client:
    """A producer's connection to one queue; for one event loop, closed by `async with`.

    Every method raises `QueueUnavailable`, with the reason, when Redis cannot be used. All may be
    repeated after that: submitting the same job twice makes one job.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        queue: str,
        results: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """Nothing is sent before the first call.

        Args:
            url: `redis://[user:password@]host[:port][/database]`, or another that `connect` knows.
            queue: its name, usually that of the model it serves.
            results: the name of the result stream that answers go to. `None` makes one up; name it
                so that several clients share it, or another program reads it.
            settings: how the client behaves; `None` takes the defaults.

        Raises:
            ConfigurationError: the URL, or the name of the queue or of the results, is not one.
        """
        self.queue = queue
        self.results = check_name("results", results or uuid.uuid4().hex, NAME_PATTERN)
        settings = settings or ClientSettings()
        self._window = settings.window
        self._redis = connect(url, queue=queue, max_connections=settings.max_connections)
        self._queue = Queue(self._redis, queue, settings.queue)
        self._answers = RecordedAnswers(self._redis, self._queue, self.results)
        self._patience = Patience(settings.patience)
        self._inbox = Inbox(self._answers, patience=self._patience)
        self._reader = DeltaReader(self._queue, self._answers, self._patience)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Whoever still waits for a result gets `QueueUnavailable`."""
        await self._inbox.close()
        await self._queue.aclose()
        await self._redis.aclose()

    async def submit(self, job: Job, *, wait_for_room: float = 0.0) -> JobId:
        """Put a job in the queue, to be answered on `job.reply_to` or else on this client's stream.

        A job that the queue has already is not run again, whether it is waiting or finished.

        Args:
            job: what is wanted.
            wait_for_room: seconds to go on trying while the queue or the tenant is at its limit, or, as
                long as `patience` allows, while Redis is away.

        Raises:
            InvalidJob: it is too large; `field` and `limit` say what and by how much.
            JobConflict: its id belongs to another job.
            QueueFull: the queue, or the tenant, was at its limit all that time.
            ValueError: `wait_for_room` is below 0.
        """
        (outcome,) = await self.submit_batch([job], wait_for_room=wait_for_room)
        if isinstance(outcome, TidemillError):
            raise outcome
        return outcome

    async def submit_batch(self, jobs: Sequence[Job], *, wait_for_room: float = 0.0) -> list[Outcome]:
        """Submit jobs in one round trip; each one's id, or why it was refused, in their order.

        Those that find no room, and only those, are tried again in their order for up to `wait_for_room`
        seconds, in which Redis may also be away; see `submit`.
        """
        submission = self._submission(wait_for_room)
        outcomes: dict[int, Outcome] = {}
        async for settled in submission.settle(jobs):
            outcomes.update(settled)
        return [outcomes[place] for place in range(len(jobs))]

    async def submit_many(
        self,
        jobs: Iterable[Job] | AsyncIterable[Job],
        *,
        batch: int = BATCH,
        on_error: OnError | None = None,
        wait_for_room: float = 0.0,
    ) -> AsyncGenerator[JobId, None]:
        """Submit any number of jobs in constant memory, `batch` at a time; yields the accepted ids.

        A refused job hinders no other one. It goes to `on_error`; without that, its error is raised
        once the ids accepted with it have been yielded, and nothing more is submitted.

        Jobs that find no room are tried again in their order, for up to `wait_for_room` seconds a
        batch, in which Redis may also be away; the next batch waits for them.
        """
        submission = self._submission(wait_for_room)
        async for chunk in abatched(jobs, batch):
            async for settled in submission.settle(chunk):
                for job_id in accepted(chunk, settled, on_error):
                    yield job_id

    def _submission(self, wait_for_room: float) -> Submission:
        return Submission(self._submit, patience=self._patience, wait_for_room=wait_for_room)

    async def _submit(self, jobs: Sequence[Job]) -> list[Outcome]:
        outcomes = await self._queue.submit(jobs, reply_to=self.results)
        return [
            job.id if isinstance(outcome, Submitted) else outcome
            for job, outcome in zip(jobs, outcomes, strict=True)
        ]

    async def result(self, job_id: JobId, *, timeout: float | None = None) -> Result:
        """Wait for the one answer to a job, whoever submitted it.

        A job that failed has an answer too: see `Result.raise_for_status`.

        Raises:
            JobUnknown: there is no such job, or its result has expired, or it was lost with the
                server's data.
            TimeoutError: no answer within `timeout` seconds.
        """
        (answer,) = await self._answers.look([job_id])
        if isinstance(answer, Result):
            return answer
        if answer is not None:
            raise answer
        try:
            async with asyncio.timeout(timeout):
                return await self._wait(job_id)
        except TimeoutError:
            raise TimeoutError(f"job {job_id} has no result after {timeout:g} s") from None

    async def _wait(self, job_id: JobId) -> Result:
        answered: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def settle(_: Watch, answer: Answer) -> None:
            if answered.done():
                return  # cancelled in the same turn of the loop
            if isinstance(answer, Result):
                answered.set_result(answer)
            else:
                answered.set_exception(answer)

        watch = self._inbox.watch(job_id, settle)
        try:
            return await answered
        finally:
            self._inbox.drop(watch)

    def as_completed(
        self, job_ids: Iterable[JobId] | AsyncIterable[JobId], *, timeout: float | None = None
    ) -> AsyncGenerator[Result, None]:
        """The answers to many jobs, each as it comes, in constant memory.

        Takes in jobs as earlier ones are answered, so `as_completed(submit_many(jobs))` keeps a
        window of them in flight. One id given twice is answered twice.

        Raises:
            JobUnknown: after all other answers, if some of the jobs do not exist.
            TimeoutError: not all were answered within `timeout` seconds of the first step.
        """
        return Completion(self._inbox, window=self._window).results(job_ids, timeout=timeout)

    def stream(self, job_id: JobId, *, timeout: float | None = None) -> AsyncGenerator[Delta, None]:
        """The pieces of a job as they come, from its beginning, each once and without a gap.

        A piece belongs to one of the job's generations, `Delta.choice`; those of each come in order,
        and together they are its text and its tokens in the result. Ends with the job, however that
        ended: `result` tells. A job submitted without `stream` comes in larger and later pieces.

        If the job began anew, on a worker of another build, the first piece after that has `restart`
        set: all pieces before it are void, and those from it on are the whole. If there are none, it
        is an empty one.

        Raises:
            JobUnknown: there is no such job, or it has expired, or was lost with the server's data.
            TimeoutError: it has not ended within `timeout` seconds.
        """
        return self._reader.deltas(job_id, timeout=timeout)

    async def status(self, job_id: JobId) -> JobView:
        """Where a job is.

        Raises:
            JobUnknown: there is no such job, or it has expired.
        """
        view = await self._queue.status(job_id)
        if view is None:
            raise unknown(self.queue, job_id)
        return view

    async def cancel(self, job_id: JobId) -> CancelOutcome:
        """Ask that a job not be run, or no further. A result that was recorded first stands."""
        return await self._queue.cancel(job_id)

    async def depth(self) -> QueueDepth:
        """How much the queue holds, and for whom."""
        return await self._queue.depth()

    async def model_card(self) -> ModelCard | None:
        """What the workers of this queue serve; `None` if there are none."""
        return await self._queue.model_card()

    async def workers(self) -> list[WorkerView]:
        """Who serves the queue: what each worker runs and has room for, by its last report."""
        return await self._queue.workers()

    async def dead_letters(self) -> AsyncGenerator[DeadLetter, None]:
        """The jobs that were given up, oldest first, in constant memory."""
        cursor = "0"
        while letters := await self._queue.dead_letters(cursor, count=DEAD_LETTER_COUNT):
            cursor = letters[-1].entry_id
            for letter in letters:
                yield letter

    async def dead_letter(self, job_id_or_entry: str) -> DeadLetter:
        """A job that was given up, by its own id or that of its dead letter.

        Raises:
            JobUnknown: there is no such dead letter, or no longer.
        """
        letter = await self._queue.dead_letter(job_id_or_entry)
        if letter is None:
            raise JobUnknown(f"there is no dead letter {job_id_or_entry} in queue {self.queue}")
        return letter

    async def requeue(self, letter: DeadLetter) -> JobId:
        """Submit a dead letter's job again, under a new id that its repeat would have too.

        It is answered as in `submit`; `requeued_from` in its metadata is the old id.

        Raises:
            InvalidJob: it is no job, or has no room for one more metadata entry.
            QueueFull: the queue, or the tenant, is at its limit; the letter stays where it is.
        """
        return await self._queue.requeue(letter, reply_to=self.results)

    async def purge_dead_letters(self, entry_ids: Sequence[str] | None) -> int:
        """Forget the dead letters of these entries, or all (`None`), for good; returns how many that were."""
        return await self._queue.purge_dead_letters(entry_ids)

    async def ping(self) -> None:
        """Return if Redis can be used; the `QueueUnavailable` raised otherwise says why not."""
        await self._queue.ping()
