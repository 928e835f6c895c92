"""Records results in the queue, each exactly once, through any absence of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tidemill.errors import QueueUnavailable
from tidemill.jobs import Result, TokenLogprobs
from tidemill.moves import FinishOutcome
from tidemill.queue import Queue
from tidemill_worker.held import HeldJob, HeldJobs
from tidemill_worker.waiting import pauses

CONCURRENCY = 8
"""Results on their way to Redis at once: enough to hide a round trip, few enough for one pool."""
TOKEN_BYTES, LOGPROB_BYTES = 6, 70
"""What a result's JSON takes for a token, and for each of a token's logprobs: about."""


class Recorder:
    """Takes results from any thread and hands each to the queue until it has an answer.

    What waits here is bounded by what is held: intake claims nothing while too many or too large ones wait.

    Args:
        unreachable: told of each call that Redis did not answer.
    """

    def __init__(
        self,
        queue: Queue,
        held: HeldJobs,
        *,
        worker: str,
        unreachable: Callable[[QueueUnavailable], None],
    ) -> None:
        self._queue = queue
        self._held = held
        self._worker = worker
        self._unreachable = unreachable
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[tuple[HeldJob, Result]] = asyncio.Queue()
        self._log = structlog.get_logger()
        self.changed = asyncio.Event()
        """Set whenever a job is let go of; whoever waits clears it."""

    def put(self, held: HeldJob, result: Result) -> None:
        """Record `result`; `held` has ended. May be called from any thread."""
        held.result_bytes = size_of(result)
        self._loop.call_soon_threadsafe(self._results.put_nowait, (held, result))

    async def run(self) -> None:
        """Record results until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(self._record_results())

    async def _record_results(self) -> None:
        while True:
            held, result = await self._results.get()
            try:
                await self._record(held, result)
            except Exception:
                # Not Redis's absence but a refusal: the lease lapses, another attempt is counted.
                self._log.exception("result_not_recorded", job=held.id)
            self._held.forget(held.request_id)
            self.changed.set()

    async def _record(self, held: HeldJob, result: Result) -> None:
        for pause in pauses():
            try:
                outcome = await self._queue.finish(self._worker, held.attempt, result)
            except QueueUnavailable as error:
                self._unreachable(error)
                self._log.debug("result_waits", job=held.id, reason=str(error))
                await asyncio.sleep(pause)
                continue
            self._log.debug("result_taken", job=held.id, attempt=held.attempt, outcome=outcome)
            if outcome is FinishOutcome.LOST:
                self._log.debug("result_dropped", job=held.id, reason="the lease is another's")
            return


def size_of(result: Result) -> int:
    """About how many bytes the result's JSON has, without making it."""
    size = sum(len(key) + len(value) for key, value in result.metadata.items())
    for choice in result.choices:
        size += len(choice.text) + TOKEN_BYTES * len(choice.token_ids) + _size_of(choice.logprobs or ())
    return size + _size_of(tuple(token for token in result.prompt_logprobs or () if token is not None))


def _size_of(logprobs: tuple[TokenLogprobs, ...]) -> int:
    return LOGPROB_BYTES * sum(1 + len(token.top) for token in logprobs)
