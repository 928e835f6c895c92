"""Map-reduce summaries of documents of any length, through the queue.

Map: each chunk of a document is one chat job. Reduce: the summaries are joined, as many as fit, and
summarized again, until one is left. All jobs begin with the same instruction, so that the worker
computes its keys and values once. Their ids are digests of what they ask for: whoever runs the same
thing again gets what was finished before, and nothing is computed twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tidemill.card import ModelCard
from tidemill.client import Client
from tidemill.errors import ConfigurationError, InvalidJob, JobUnknown, QueueUnavailable
from tidemill.jobs import FinishReason, Job, JobId, Message, Result, Status
from tidemill.params import SamplingParams
from tidemill_producer.cancellation import stop
from tidemill_producer.documents import Document, Unreadable
from tidemill_producer.prose import prose_of
from tidemill_producer.sentences import whole_sentences, without_repeats
from tidemill_producer.splitting import Splitter, load_tokenizer
from tidemill_producer.summary import (
    JOINT_TOKENS,
    Failure,
    Summary,
    SummaryFailed,
    SummaryOptions,
    Tally,
)

WINDOW = 256
"""Jobs in flight: enough to keep some workers busy, and the most an interrupted run leaves behind."""
MAX_TRIES = 8
"""How many failures of earlier runs are passed over until a job counts as hopeless."""
CARD_INTERVAL = 0.5
SEPARATOR = "\n\n"
RUN = "run"
"""The metadata key that tells the jobs of this run from those that an earlier one left."""

T = TypeVar("T")

OnProgress = Callable[[Tally], None]


async def await_card(
    client: Client, *, timeout: float, on_wait: Callable[[str], None] = lambda _: None
) -> ModelCard:
    """The card of the model that serves the client's queue; `on_wait` is told once if there is none.

    Raises:
        QueueUnavailable: there is still none after `timeout` seconds.
    """
    clock = asyncio.get_running_loop().time
    give_up = clock() + timeout
    card = await client.model_card()
    if card is None and timeout > 0:
        on_wait(f"no worker serves queue {client.queue} yet; waiting up to {timeout:g} s")
    while card is None:
        if clock() >= give_up:
            raise QueueUnavailable(f"no worker serves queue {client.queue}")
        await asyncio.sleep(min(CARD_INTERVAL, timeout))
        card = await client.model_card()
    return card


class Summarizer:
    """Summarizes documents with the model that `card` describes.

    Args:
        client: of the queue that serves this model.
        card: see `await_card`.
        options: what the summaries should be like.
        window: jobs in flight, and documents in memory, at most.
        wait_for_room: seconds that each job may wait for room in a full queue; after that `QueueFull`
            ends all.
        on_progress: is shown `total` after each answer.

    Raises:
        ConfigurationError: the options do not fit the model, or its worker published no tokenizer.
    """

    def __init__(
        self,
        client: Client,
        card: ModelCard,
        options: SummaryOptions | None = None,
        *,
        window: int = WINDOW,
        wait_for_room: float = math.inf,
        on_progress: OnProgress = lambda _: None,
    ) -> None:
        options = options or SummaryOptions()
        tokenizer_json = card.tokenizer_json
        if tokenizer_json is None:
            raise ConfigurationError(f"the worker of {card.model} published no tokenizer to split by")
        self.total = Tally()
        self._client = client
        self._model = card.model
        self._options = options
        self._splitter = Splitter(load_tokenizer(tokenizer_json))
        self._chunk_tokens = options.fit(
            card, instruction_tokens=self._splitter.count(options.system + options.instruction)
        )
        self._window = window
        self._wait_for_room = wait_for_room
        self._room = asyncio.Semaphore(window)
        self._on_progress = on_progress
        self._run = uuid.uuid4().hex
        self._in_flight: set[JobId] = set()

    async def summarize_all(
        self, documents: Iterable[Document | Unreadable]
    ) -> AsyncGenerator[Summary | Failure, None]:
        """Summarize `documents` side by side, and yield each as soon as it is done.

        Closed early, it leaves the jobs that were submitted in the queue, for the next run.
        """
        pending: set[asyncio.Task[Summary | Failure]] = set()
        try:
            for document in documents:
                if isinstance(document, Unreadable):
                    yield Failure(document.name, document.reason)
                    continue
                pending.add(asyncio.create_task(self._outcome(document)))
                async for outcome in _finished(pending, down_to=self._window - 1):
                    yield outcome
            async for outcome in _finished(pending, down_to=0):
                yield outcome
        finally:
            await stop(pending)

    async def summarize(self, document: Document) -> Summary:
        """Summarize one document.

        Raises:
            SummaryFailed: a part of it could not be summarized.
        """
        tally = Tally()
        text = document.text if self._options.markup else prose_of(document.text)
        summaries = await self._map(self._chunks(text, tally), tally)
        while len(summaries) > 1:
            summaries = await self._reduce(summaries, tally)
        if not summaries:
            raise SummaryFailed("the model wrote nothing" if tally.jobs else "empty")
        return Summary(document.name, summaries[0], tally)

    async def cancel(self) -> None:
        """Cancel the jobs in flight. Only right where no other run shares the scope of this one."""
        await asyncio.gather(*(self._client.cancel(job_id) for job_id in self._in_flight))

    async def _outcome(self, document: Document) -> Summary | Failure:
        try:
            return await self.summarize(document)
        except SummaryFailed as error:
            return Failure(document.name, str(error))

    def _chunks(self, text: str, tally: Tally) -> Iterator[str]:
        for chunk in self._splitter.split(text, self._chunk_tokens):
            tally.chunks += 1
            self.total.chunks += 1
            yield chunk

    async def _reduce(self, summaries: Sequence[str], tally: Tally) -> list[str]:
        """One round: half as many summaries at most. One that was left over waits for the next."""
        groups = list(self._groups(summaries))
        alone = groups.pop() if len(groups[-1]) == 1 else []
        return await self._map(map(SEPARATOR.join, groups), tally) + alone

    def _groups(self, summaries: Iterable[str]) -> Iterator[list[str]]:
        """Neighbours that fit one job together; always at least two, except the last."""
        half = (self._chunk_tokens - JOINT_TOKENS) // 2
        group: list[str] = []
        for summary in summaries:
            part = next(self._splitter.split(summary, half))
            full = self._splitter.count(SEPARATOR.join([*group, part])) > self._chunk_tokens
            if full and len(group) > 1:
                yield group
                group = []
            group.append(part)
        yield group

    async def _map(self, texts: Iterable[str], tally: Tally) -> list[str]:
        """The summaries of `texts`, in their order, without those in which the model wrote nothing."""
        tasks: list[asyncio.Task[str]] = []
        failures: list[BaseException] = []

        def leave(task: asyncio.Task[str]) -> None:
            self._room.release()
            if not task.cancelled() and (failure := task.exception()):
                failures.append(failure)

        try:
            for text in texts:
                await self._room.acquire()
                if failures:
                    self._room.release()
                    break
                tasks.append(asyncio.create_task(self._summarize_text(text, tally)))
                tasks[-1].add_done_callback(leave)
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await stop(tasks)
        if failures:
            raise failures[0]
        return [summary for task in tasks if (summary := task.result())]

    async def _summarize_text(self, text: str, tally: Tally) -> str:
        result = await self._answer(text)
        reused = result.metadata.get(RUN) != self._run
        tally.count(result, reused=reused)
        self.total.count(result, reused=reused)
        self._on_progress(self.total)
        if result.status is not Status.SUCCEEDED:
            reason = result.error.message if result.error else result.status.value
            raise SummaryFailed(f"job {result.id}: {reason}")
        cut_off = result.finish_reason is FinishReason.LENGTH
        return without_repeats(whole_sentences(result.text) if cut_off else result.text)

    async def _answer(self, text: str) -> Result:
        """The answer to the job that asks for `text`; a failure that an earlier run left is retried."""
        for attempt in range(MAX_TRIES):
            job = self._job(text, attempt)
            try:
                result = await self._run_job(job)
            except JobUnknown:
                continue  # the server has lost its data, or the result its time
            if result.status is Status.SUCCEEDED or result.metadata.get(RUN) == self._run:
                return result
        raise SummaryFailed(f"job {job.id}: failed in {MAX_TRIES} earlier runs")

    async def _run_job(self, job: Job) -> Result:
        self._in_flight.add(job.id)
        await self._submit(job)
        result = await self._client.result(job.id)
        self._in_flight.discard(job.id)
        return result

    async def _submit(self, job: Job) -> None:
        """Submit `job`, as soon as the queue has room for it."""
        try:
            await self._client.submit(job, wait_for_room=self._wait_for_room)
        except InvalidJob as error:
            raise SummaryFailed(str(error)) from error

    def _job(self, text: str, attempt: int) -> Job:
        options = self._options
        job = Job(
            model=self._model,
            messages=(
                Message(role="system", content=options.system),
                Message(role="user", content=f"{options.instruction}{SEPARATOR}{text}"),
            ),
            params=SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature),
            priority=options.priority,
            tenant=options.tenant,
            metadata={RUN: self._run},
        )
        identity = SEPARATOR.join((job.digest(), options.tenant, options.scope, str(attempt)))
        digest = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        return job.model_copy(update={"id": JobId(f"summary-{digest}")})


async def _finished(pending: set[asyncio.Task[T]], *, down_to: int) -> AsyncGenerator[T, None]:
    """Take what is done out of `pending`, as it comes, until only `down_to` are left."""
    while len(pending) > down_to:
        done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            pending.discard(task)
            yield task.result()
