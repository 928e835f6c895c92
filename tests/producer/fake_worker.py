"""A worker without a model: it takes jobs from a real queue and answers them at once."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from tests.producer.factories import byte_level_bpe
from tidemill.card import ModelCard
from tidemill.connection import connect
from tidemill.errors import ErrorCode
from tidemill.jobs import ErrorInfo, FinishReason, Job, Result, Status, Usage
from tidemill.moves import Claimed
from tidemill.queue import Queue
from tidemill_producer.cancellation import stop

MODEL = "fake-model"
OVERHEAD = 10

Answer = Callable[[Job], str | None]
"""The text for a job; `None` leaves it running. Raising `RuntimeError` fails it."""


def make_card(**fields: object) -> ModelCard:
    tokenizer = ModelCard.compress(byte_level_bpe().to_str().encode())
    defaults = {"model": MODEL, "max_model_len": 2048, "max_total_tokens": 4096}
    return ModelCard.model_validate(
        defaults | {"chat_template_overhead": OVERHEAD, "tokenizer_zlib": tokenizer} | fields
    )


def text_of(job: Job) -> str:
    """What the job asks to be summarized."""
    assert job.messages is not None
    return job.messages[-1].content.split("\n\n", 1)[1]


def brief_of(text: str) -> str:
    return f"Brief {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}."


def brief(job: Job) -> str:
    """A summary that tells of which text it is one."""
    return brief_of(text_of(job) if job.messages else job.prompt or "")


class FakeWorker:
    """Remembers every job it was given, in order."""

    def __init__(self, queue: Queue, answer: Answer = brief, *, room: int = 64) -> None:
        self.jobs: list[Job] = []
        self.peak = 0
        self.answer = answer
        self._queue = queue
        self._room = room
        self._held: list[tuple[Claimed, Job]] = []

    @property
    def claims(self) -> Counter[str]:
        """How often each job was given to this worker."""
        return Counter(job.id for job in self.jobs)

    async def answer_held(self) -> None:
        """Finish what was left running so far."""
        while self._held:
            claim, job = self._held.pop()
            await self._finish(claim, job, text=self.answer(job))

    def answer_held_soon(self) -> None:
        """The same, from another thread."""
        asyncio.run_coroutine_threadsafe(self.answer_held(), self._loop).result(10)

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        while True:
            claimed = await self._queue.claim("fake", self._room)
            self.peak = max(self.peak, len(claimed))
            for claim in claimed:
                await self._take(claim)
            if not claimed:
                await self._queue.wait(0.5)

    async def _take(self, claim: Claimed) -> None:
        job = Job.from_wire(claim.payload)
        self.jobs.append(job)
        try:
            text = self.answer(job)
        except RuntimeError as error:
            await self._finish(claim, job, error=ErrorInfo(code=ErrorCode.INTERNAL, message=str(error)))
        else:
            if text is None:
                self._held.append((claim, job))
            else:
                await self._finish(claim, job, text=text)

    async def _finish(self, claim: Claimed, job: Job, **fields: object) -> None:
        failed = "error" in fields
        result = Result.model_validate(
            {
                "id": job.id,
                "status": Status.FAILED if failed else Status.SUCCEEDED,
                "model": MODEL,
                "finish_reason": None if failed else FinishReason.STOP,
                "usage": Usage(prompt_tokens=100, completion_tokens=7, cached_tokens=64),
                "metadata": job.metadata,
                "worker": "fake",
                **fields,
            }
        )
        await self._queue.finish("fake", claim.attempt, result)


@asynccontextmanager
async def serving(url: str, name: str, answer: Answer = brief, **card: object) -> AsyncIterator[FakeWorker]:
    """A queue that is served while the context lasts."""
    redis = connect(url, max_connections=4)
    queue = Queue(redis, name)
    worker = FakeWorker(queue, answer)
    await queue.publish_card(make_card(**card))
    task = asyncio.create_task(worker.serve())
    try:
        yield worker
    finally:
        await stop([task])
        await queue.aclose()
        await redis.aclose()


@contextmanager
def serving_in_thread(url: str, name: str, answer: Answer = brief) -> Iterator[FakeWorker]:
    """The same for code that has no event loop, or one of its own."""
    ready = threading.Event()
    workers: list[FakeWorker] = []
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with serving(url, name, answer) as worker:
            workers.append(worker)
            stops.append(lambda: loop.call_soon_threadsafe(ended.set))
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(10)
        yield workers[0]
    finally:
        stops[0]()
        thread.join(10)
