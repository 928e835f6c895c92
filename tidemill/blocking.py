"""The blocking face of the client: the same names, for code without an event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Collection, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from tidemill.card import ModelCard
from tidemill.client import DEFAULT_URL, Client, ClientSettings
from tidemill.errors import QueueUnavailable
from tidemill.inbox import end
from tidemill.jobs import Delta, Job, JobId, Result
from tidemill.moves import CancelOutcome, DeadLetter, JobView, QueueDepth
from tidemill.registry import WorkerView
from tidemill.submission import BATCH, OnError, Outcome, accepted, batched

T = TypeVar("T")


class BlockingClient:
    """`Client` on an event loop in a thread of its own. May be shared by threads.

    The thread starts with the first call, so that a client made before a fork works after it; one
    that was used before the fork must be made anew.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        queue: str,
        results: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """See `Client`.

        Raises:
            ConfigurationError: the URL, or the name of the queue or of the results, is not one.
        """
        self._client = Client(url, queue=queue, results=results, settings=settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.RLock()  # what is collected while it is held may need it too

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def queue(self) -> str:
        """The name of the queue."""
        return self._client.queue

    @property
    def results(self) -> str:
        """The name of the result stream that answers go to."""
        return self._client.results

    def submit(self, job: Job, *, wait_for_room: float = 0.0) -> JobId:
        """See `Client.submit`."""
        return self._call(self._client.submit(job, wait_for_room=wait_for_room))

    def submit_batch(self, jobs: Sequence[Job], *, wait_for_room: float = 0.0) -> list[Outcome]:
        """See `Client.submit_batch`."""
        return self._call(self._client.submit_batch(jobs, wait_for_room=wait_for_room))

    def submit_many(
        self,
        jobs: Iterable[Job],
        *,
        batch: int = BATCH,
        on_error: OnError | None = None,
        wait_for_room: float = 0.0,
    ) -> Iterator[JobId]:
        """See `Client.submit_many`; `jobs` is walked, and `on_error` called, in the calling thread."""
        submission = self._client._submission(wait_for_room)
        for chunk in batched(jobs, batch):
            for settled in self._iterate(submission.settle(chunk)):
                yield from accepted(chunk, settled, on_error)

    def result(self, job_id: JobId, *, timeout: float | None = None) -> Result:
        """See `Client.result`."""
        return self._call(self._client.result(job_id, timeout=timeout))

    def stream(self, job_id: JobId, *, timeout: float | None = None) -> Iterator[Delta]:
        """See `Client.stream`."""
        return self._iterate(self._client.stream(job_id, timeout=timeout))

    def as_completed(self, job_ids: Iterable[JobId], *, timeout: float | None = None) -> Iterator[Result]:
        """See `Client.as_completed`. An iterator is walked in a thread of its own.

        So `as_completed(submit_many(...))` submits and answers at the same time.
        """
        source = job_ids if isinstance(job_ids, Collection) else _walked_elsewhere(job_ids)
        return self._iterate(self._client.as_completed(source, timeout=timeout))

    def status(self, job_id: JobId) -> JobView:
        """See `Client.status`."""
        return self._call(self._client.status(job_id))

    def cancel(self, job_id: JobId) -> CancelOutcome:
        """See `Client.cancel`."""
        return self._call(self._client.cancel(job_id))

    def depth(self) -> QueueDepth:
        """See `Client.depth`."""
        return self._call(self._client.depth())

    def model_card(self) -> ModelCard | None:
        """See `Client.model_card`."""
        return self._call(self._client.model_card())

    def workers(self) -> list[WorkerView]:
        """See `Client.workers`."""
        return self._call(self._client.workers())

    def dead_letters(self) -> Generator[DeadLetter, None, None]:
        """See `Client.dead_letters`."""
        return self._iterate(self._client.dead_letters())

    def dead_letter(self, job_id_or_entry: str) -> DeadLetter:
        """See `Client.dead_letter`."""
        return self._call(self._client.dead_letter(job_id_or_entry))

    def requeue(self, letter: DeadLetter) -> JobId:
        """See `Client.requeue`."""
        return self._call(self._client.requeue(letter))

    def purge_dead_letters(self, entry_ids: Sequence[str] | None) -> int:
        """See `Client.purge_dead_letters`."""
        return self._call(self._client.purge_dead_letters(entry_ids))

    def ping(self) -> None:
        """See `Client.ping`."""
        self._call(self._client.ping())

    def close(self) -> None:
        """Close the connections and end the thread. Whoever still waits in another thread is told."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or self._loop is None or self._thread is None or not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut_down(self) -> None:
        await self._client.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        await end(*calls)
        await asyncio.get_running_loop().shutdown_asyncgens()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._running_loop())
        except RuntimeError:
            work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise QueueUnavailable("the client was closed in another thread") from None
        except BaseException:
            future.cancel()  # the caller was interrupted; without effect if the work itself failed
            raise

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError("this client was closed")
            if self._loop is None or self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="tidemill-client", daemon=True
                )
                self._thread.start()
            if not self._thread.is_alive():
                raise RuntimeError("this client was used before this process was forked; make another")
            return self._loop

    def _iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        walk = _Walk(items)
        try:
            while (item := self._call(walk.step())) is not None:
                yield item
        finally:
            self._leave(walk.close())

    def _leave(self, closing: Coroutine[Any, Any, None]) -> None:
        """Close an iterator that may not have been walked to its end, unless it ended with the client.

        The last reference to one may vanish in the loop's own thread, where nobody can wait for the loop.
        """
        is_gone = self._closed or self._thread is None or not self._thread.is_alive() or sys.is_finalizing()
        if is_gone:
            closing.close()
        elif threading.current_thread() is self._thread:
            asyncio.run_coroutine_threadsafe(closing, self._running_loop())
        else:
            self._call(closing)


class _Walk(Generic[T]):
    """A walk through `items`, on the loop, step by step."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._turn = asyncio.Lock()
        self._stepping: asyncio.Task[Any] | None = None

    async def step(self) -> T | None:
        """The next item; `None` after the last."""
        async with self._turn:
            self._stepping = asyncio.current_task()
            try:
                return await anext(self._items, None)
            finally:
                self._stepping = None

    async def close(self) -> None:
        """End it, though a step may go on that nobody waits for: one whose caller was interrupted early."""
        if self._stepping is not None:
            self._stepping.cancel()
        async with self._turn:
            await self._items.aclose()


async def _walked_elsewhere(items: Iterable[T]) -> AsyncGenerator[T, None]:
    """Items that their iterable makes in another thread, where it may block and use this client."""
    iterator = iter(items)
    while (item := await asyncio.to_thread(next, iterator, None)) is not None:
        yield item
