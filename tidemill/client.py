"""The SDK: put jobs in a queue and get their results.

    async with Client("redis://127.0.0.1:6379/0", queue="smollm2") as client:
        job_id = await client.submit(Job(prompt="Once upon a time"))
        print((await client.result(job_id)).text)

`BlockingClient` has the same methods for code without an event loop.
"""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from tidemill.answers import RecordedAnswers, unknown
from tidemill.card import ModelCard
from tidemill.completion import Completion, each
from tidemill.connection import MAX_CONNECTIONS, connect
from tidemill.errors import ConfigurationError, TidemillError
from tidemill.inbox import Answer, Inbox, Watch
from tidemill.jobs import Delta, Job, JobId, Result
from tidemill.moves import CancelOutcome, JobState, JobView, QueueDepth, QueueSettings, Submitted
from tidemill.queue import Queue
from tidemill.schema import NAME_PATTERN, QUEUE_PATTERN
from tidemill.told import Told

T = TypeVar("T")

DEFAULT_URL = "redis://127.0.0.1:6379/0"
BATCH = 500
"""Jobs of one pipelined round trip."""
BLOCK = 1.0
"""Seconds that one read of a streamed generation waits."""
DELTA_COUNT = 100

OnError = Callable[[Job, TidemillError], None]


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
    """Jobs that one `as_completed` waits for at a time, which bounds its memory."""
    patience: float = 30.0
    """Seconds that Redis may be away before those who wait for a result are told."""

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
            url: `redis://[user:password@]host[:port][/database]`, `rediss://…` or `unix://…`.
            queue: its name, usually that of the model it serves.
            results: the name of the result stream that answers go to. `None` makes one up; name it
                so that several clients share it, or another program reads it.
            settings: how the client behaves; `None` takes the defaults.

        Raises:
            ConfigurationError: the URL, or the name of the queue or of the results, is not one.
        """
        self.queue = _checked("queue", queue, QUEUE_PATTERN)
        self.results = _checked("results", results or uuid.uuid4().hex, NAME_PATTERN)
        settings = settings or ClientSettings()
        self._window = settings.window
        self._redis = connect(url, max_connections=settings.max_connections)
        self._queue = Queue(self._redis, queue, settings.queue)
        self._answers = RecordedAnswers(self._redis, self._queue, self.results)
        self._inbox = Inbox(self._answers, patience=settings.patience)

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

    async def submit(self, job: Job) -> JobId:
        """Put a job in the queue, to be answered on `job.reply_to` or else on this client's stream.

        A job that the queue has already is not run again, whether it is waiting or finished.

        Raises:
            InvalidJob: it is too large; `field` and `limit` say what and by how much.
            JobConflict: its id belongs to another job.
            QueueFull: the queue, or the tenant, is at its limit.
        """
        (outcome,) = await self.submit_batch([job])
        if isinstance(outcome, TidemillError):
            raise outcome
        return outcome

    async def submit_batch(self, jobs: Sequence[Job]) -> list[JobId | TidemillError]:
        """Submit jobs in one round trip; each one's id, or why it was refused, in their order."""
        outcomes = await self._queue.submit(jobs, reply_to=self.results)
        return [
            job.id if isinstance(outcome, Submitted) else outcome
            for job, outcome in zip(jobs, outcomes, strict=True)
        ]

    async def submit_many(
        self,
        jobs: Iterable[Job] | AsyncIterable[Job],
        *,
        batch: int = BATCH,
        on_error: OnError | None = None,
    ) -> AsyncGenerator[JobId, None]:
        """Submit any number of jobs in constant memory, `batch` at a time; yields the accepted ids.

        A refused job hinders no other one. It goes to `on_error`; without that, its error is raised
        once the ids of its batch have been yielded, and later batches are not submitted.
        """
        async for chunk in _batched(jobs, batch):
            for job_id in accepted(chunk, await self.submit_batch(chunk), on_error):
                yield job_id

    async def result(self, job_id: JobId, *, timeout: float | None = None) -> Result:
        """Wait for the one answer to a job, whoever submitted it.

        A job that failed has an answer too: see `Result.raise_for_status`.

        Raises:
            JobUnknown: there is no such job, or its result has expired.
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

    async def stream(self, job_id: JobId, *, timeout: float | None = None) -> AsyncGenerator[Delta, None]:
        """The pieces of a job as they come, from its beginning, each once and without a gap.

        A piece belongs to one of the job's generations, `Delta.choice`; those of each come in order,
        and together they are its text and its tokens in the result. Ends with the job, however that
        ended: `result` tells. A job submitted without `stream` comes in larger and later pieces.

        Raises:
            JobUnknown: there is no such job, or it has expired.
            TimeoutError: it has not ended within `timeout` seconds.
        """
        clock = asyncio.get_running_loop().time
        give_up = math.inf if timeout is None else clock() + timeout
        ended = await self._is_done(job_id)
        cursor, told = "0", Told()
        while True:
            block = 0.0 if ended else max(0.0, min(BLOCK, give_up - clock()))
            page = await self._queue.deltas(job_id, cursor, count=DELTA_COUNT, block=block)
            cursor = page.cursor
            for delta in page.deltas:
                told.count(delta)
                yield delta
            if page.ended or (ended and not page.deltas):
                break
            if not ended and clock() >= give_up:
                raise TimeoutError(f"job {job_id} has not ended after {timeout:g} s")
            if not page.deltas:
                ended = await self._is_done(job_id)
        for rest in told.rest(await self.result(job_id)):
            yield rest

    async def _is_done(self, job_id: JobId) -> bool:
        view = await self.status(job_id)
        if view.may_expire:
            await self._queue.expire()  # as in RecordedAnswers.look
        return view.state is JobState.DONE

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

    async def ping(self) -> None:
        """Return if Redis can be used; the `QueueUnavailable` raised otherwise says why not."""
        await self._queue.ping()


def _checked(what: str, name: str, pattern: str) -> str:
    if re.fullmatch(pattern, name) is None:
        raise ConfigurationError(f"{what}: {name!r} is not a name; it must match {pattern}")
    return name


def accepted(
    jobs: Sequence[Job], outcomes: Sequence[JobId | TidemillError], on_error: OnError | None
) -> Iterator[JobId]:
    """The ids among the outcomes of a batch; refusals go to `on_error` or are raised at the end."""
    refusals: list[TidemillError] = []
    for job, outcome in zip(jobs, outcomes, strict=True):
        if not isinstance(outcome, TidemillError):
            yield outcome
        elif on_error is not None:
            on_error(job, outcome)
        else:
            refusals.append(outcome)
    if refusals:
        raise refusals[0]


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items, the last one possibly shorter."""
    chunk: list[T] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def _batched(items: Iterable[T] | AsyncIterable[T], size: int) -> AsyncIterator[list[T]]:
    chunk: list[T] = []
    async for item in each(items):
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
