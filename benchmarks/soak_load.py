"""The soak's jobs, who submits and cancels them, and who reads along."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tidemill import Job, SamplingParams
from tidemill.client import Client
from tidemill.errors import QueueUnavailable, TidemillError
from tidemill.jobs import JobId, Priority, Result
from tidemill.moves import CancelOutcome
from tidemill.queue import Queue

T = TypeVar("T")

PAUSE = 0.1
"""Seconds between two tries while the server is away, and between two looks for room."""
BATCH = 32
CANCELLED, RESUBMITTED, AWAITED = 0.06, 0.06, 0.02
"""Shares of the jobs that are cancelled, submitted a second time, and waited for one by one."""
STREAM_READERS = 8
"""Streamed jobs that are read along at a time; the others of them are streamed to nobody."""
DELAY = 4.0
"""Seconds: longer than most jobs take, shorter than those do that lose a worker."""
DEADLINE = 24 * 3600.0
"""Seconds: passed on, watched, and never reached."""
PROMPTS = (
    "The tide turns the mill, and the mill grinds the corn.",
    "Once a miller lived by the sea, where the water went out twice a day.",
    "Žluťoučký kůň úpěl ďábelské ódy.",
    "水車は潮で回る。",
)
TEMPLATE = "template"
"""Metadata that says which template a job is a copy of; it comes back with the result."""


def make_templates(count: int, *, seed: int) -> list[Job]:
    """Jobs of mixed kinds, of which the soak's jobs are copies, so that each has an answer to compare.

    All have a seed: then the answer is the same to the last bit, whoever computes it.
    """
    dice = random.Random(seed)
    kinds = (_greedy, _sampled, _sampled, _several, _stopped, _with_logprobs, _penalized, _chat)
    jobs = [_template(kinds[number % len(kinds)](dice), number, dice) for number in range(count)]
    return [*jobs, *_invalid(len(jobs))]


def _template(fields: dict[str, Any], number: int, dice: random.Random) -> Job:
    params = {
        "seed": dice.getrandbits(62),
        "max_tokens": min(400, max(20, round(50 * dice.lognormvariate(0.0, 0.8)))),
        "ignore_eos": dice.random() < 0.8,
        **fields.pop("params"),
    }
    given = fields or {"prompt": " ".join(dice.choices(PROMPTS, k=dice.randint(1, 8)))}
    return Job(params=SamplingParams(**params), metadata={TEMPLATE: str(number)}, **given)


def _greedy(dice: random.Random) -> dict[str, Any]:
    return {"params": {"temperature": 0.0}}


def _sampled(dice: random.Random) -> dict[str, Any]:
    return {"params": {"temperature": dice.choice((0.8, 1.0)), "top_p": dice.choice((0.9, 1.0))}}


def _several(dice: random.Random) -> dict[str, Any]:
    return {"params": {"temperature": 1.0, "n": dice.randint(2, 4), "max_tokens": dice.randint(10, 60)}}


def _stopped(dice: random.Random) -> dict[str, Any]:
    return {"params": {"temperature": 0.9, "stop": ("e", "in"), "min_tokens": dice.randint(5, 20)}}


def _with_logprobs(dice: random.Random) -> dict[str, Any]:
    return {
        "params": {"temperature": 1.0, "logprobs": dice.randint(0, 5), "max_tokens": dice.randint(10, 90)}
    }


def _penalized(dice: random.Random) -> dict[str, Any]:
    return {"params": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5, "top_k": 50}}


def _chat(dice: random.Random) -> dict[str, Any]:
    turn = {"role": "user", "content": dice.choice(PROMPTS)}
    return {"messages": (turn,), "params": {"temperature": 0.8}}


def _invalid(first: int) -> list[Job]:
    """What only a worker can refuse."""
    wrong: tuple[dict[str, Any], ...] = (
        {"prompt_token_ids": (10**6,)},
        {"prompt": "x", "params": SamplingParams(max_tokens=10**6)},
        {"prompt": "x", "model": "another"},
    )
    return [Job(metadata={TEMPLATE: str(first + i)}, **fields) for i, fields in enumerate(wrong)]


@dataclass
class Sent:
    """What the soak knows of one job."""

    job: Job
    is_accepted: bool = False
    """The queue has said that it has it; from then on it owes an answer."""
    is_cancelled: bool = False
    """It was asked to cancel it."""
    streamed: dict[int, str] | None = None
    """Text by choice, as a reader of the stream was told it to the end; `None` if nobody read it so far."""
    awaited: Result | None = None
    """What somebody who waited for this job alone was given."""
    complaint: str = ""
    """How somebody who asked for this job was treated, and never should have been."""

    @property
    def template(self) -> int:
        return int(self.job.metadata[TEMPLATE])


@dataclass
class Load:
    """Keeps the queue from running dry, and reads what comes out of it.

    Args:
        client: its result stream is the one that all answers go to.
        queue: the same queue, for reading that stream by cursor.
        ahead: unfinished jobs that there are to be at any time.
        delay: seconds after its submission within which a job is cancelled or submitted again.
    """

    client: Client
    queue: Queue
    templates: Sequence[Job]
    dice: random.Random
    ahead: int
    delay: float = DELAY
    sent: dict[JobId, Sent] = field(default_factory=dict)
    seen: set[JobId] = field(default_factory=set)
    """Jobs whose answers have been read."""
    num_accepted: int = 0
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _streams: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STREAM_READERS))

    @property
    def num_unanswered(self) -> int:
        return self.num_accepted - len(self.seen)

    def stop(self) -> None:
        """Submit no more; what was begun with each job is still completed."""
        self._stopping.set()

    async def run(self) -> None:
        """Submit until stopped, then return when all that was begun with those jobs has been done."""
        async with asyncio.TaskGroup() as parts:
            while not self._stopping.is_set():
                room = min(BATCH, self.ahead - self.num_unanswered)
                if room > 0:
                    await self._submit([self._make_job() for _ in range(room)], parts)
                else:
                    await asyncio.sleep(PAUSE)

    async def read(self) -> None:
        """Read all answers as a program does that keeps a cursor, until cancelled."""
        cursor = "0"
        while True:
            page = await insist(partial(self.queue.results, self.client.results, cursor, block=1.0))
            for entry, result in page:
                self.seen.add(result.id)
                cursor = entry

    async def until_answered(self) -> None:
        """Return when every job that was accepted has an answer that was read."""
        while self.num_unanswered:
            await asyncio.sleep(PAUSE)

    def _make_job(self) -> Job:
        template = self.dice.choice(self.templates)
        changes = {
            "id": JobId(f"soak-{len(self.sent):06}"),
            "priority": self.dice.choice(list(Priority)),
            "tenant": self.dice.choice(("ann", "bob", "cem")),
            "deadline": self.dice.choice((None, DEADLINE)),
            "stream": self.dice.random() < 0.4,
        }
        job = template.model_copy(update=changes)
        self.sent[job.id] = Sent(job)
        return job

    async def _submit(self, jobs: Sequence[Job], parts: asyncio.TaskGroup) -> None:
        sent = [self.sent[job.id] for job in jobs]
        with noting("its submission", sent):
            outcomes = await insist(lambda: self.client.submit_batch(jobs))
        for one, outcome in zip(sent, outcomes, strict=True):
            if isinstance(outcome, TidemillError):
                raise outcome
            one.is_accepted = True
            self.num_accepted += 1
            for fate in self._fates(one):
                parts.create_task(fate)

    def _fates(self, sent: Sent) -> list[Coroutine[None, None, None]]:
        """What else happens to a job. The dice are thrown here, in the order of submission."""
        delay = self.dice.uniform(0.0, self.delay)
        fates = []
        if self.dice.random() < CANCELLED:
            fates.append(self._cancel(sent, delay))
        if self.dice.random() < RESUBMITTED:
            fates.append(self._resubmit(sent, delay))
        if self.dice.random() < AWAITED:
            fates.append(self._await(sent))
        if sent.job.stream and not self._streams.locked():
            fates.append(self._stream(sent))
        return fates

    async def _cancel(self, sent: Sent, delay: float) -> None:
        await asyncio.sleep(delay)
        sent.is_cancelled = True
        with noting("its cancellation", [sent]):
            if await insist(lambda: self.client.cancel(sent.job.id)) is CancelOutcome.UNKNOWN:
                complain([sent], "its cancellation: unknown")

    async def _resubmit(self, sent: Sent, delay: float) -> None:
        await asyncio.sleep(delay)
        with noting("its second submission", [sent]):
            await insist(lambda: self.client.submit(sent.job))

    async def _await(self, sent: Sent) -> None:
        with noting("the wait for it", [sent]):
            sent.awaited = await insist(lambda: self.client.result(sent.job.id))

    async def _stream(self, sent: Sent) -> None:
        async with self._streams:
            with noting("its stream", [sent]):
                sent.streamed = await insist(lambda: self._told(sent.job.id))

    async def _told(self, job_id: JobId) -> dict[int, str]:
        told: dict[int, str] = {}
        async for delta in self.client.stream(job_id):
            if delta.restart:
                told.clear()
            told[delta.choice] = told.get(delta.choice, "") + delta.text
        return told


async def insist(operation: Callable[[], Awaitable[T]]) -> T:
    """Try until the server is there: nothing that a client does may be given up for its absence."""
    while True:
        try:
            return await operation()
        except QueueUnavailable:
            await asyncio.sleep(PAUSE)


@contextmanager
def noting(what: str, jobs: Iterable[Sent]) -> Iterator[None]:
    """Keep with the jobs that a call of somebody who asked for them was refused, or has not ended.

    That is evidence, to be weighed with the rest, and not the end of the soak. Calls are cancelled when it is
    over, which is long after the last answer.
    """
    try:
        yield
    except TidemillError as error:
        complain(jobs, f"{what}: {type(error).__name__}: {error}")
    except asyncio.CancelledError:
        complain(jobs, f"{what} did not end")
        raise


def complain(jobs: Iterable[Sent], complaint: str) -> None:
    """Keep it with each of these jobs."""
    for sent in jobs:
        sent.complaint = complaint
