"""Given documents and a served queue, what is asked of the worker, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest

from tests.producer.factories import ENGLISH, byte_level_bpe, make_text
from tests.producer.fake_worker import brief, brief_of, make_card, serving, text_of
from tests.tidemill.servers import Server
from tidemill.client import Client, ClientSettings
from tidemill.errors import ConfigurationError, QueueFull, QueueUnavailable
from tidemill.jobs import Job
from tidemill.moves import QueueSettings
from tidemill_producer.documents import Document, Unreadable
from tidemill_producer.splitting import Splitter
from tidemill_producer.summarize import Summarizer, await_card
from tidemill_producer.summary import INSTRUCTION, SYSTEM, Failure, Summary, SummaryFailed, SummaryOptions

SMALL = SummaryOptions(max_tokens=40, chunk_tokens=120)
COUNT = Splitter(byte_level_bpe()).count


@asynccontextmanager
async def summarizing(
    server: Server, queue: str, options: SummaryOptions = SMALL, **kwargs: object
) -> AsyncIterator[Summarizer]:
    async with Client(server.url, queue=queue) as client:
        yield Summarizer(client, await await_card(client, timeout=5), options, **kwargs)  # type: ignore[arg-type]


async def outcomes(
    summarizer: Summarizer, documents: Iterable[Document | Unreadable]
) -> list[Summary | Failure]:
    return [outcome async for outcome in summarizer.summarize_all(documents)]


async def test_a_short_document_is_one_job_with_the_instruction_first(server: Server, queue: str) -> None:
    async with (
        serving(server.url, queue) as worker,
        summarizing(server, queue, SummaryOptions(max_tokens=33)) as summarizer,
    ):
        summary = await summarizer.summarize(Document("mill.md", ENGLISH))

    assert summary.name == "mill.md"
    assert summary.text == brief_of(ENGLISH.strip())
    (job,) = worker.jobs
    assert [(m.role, m.content) for m in job.messages or ()] == [
        ("system", SYSTEM),
        ("user", f"{INSTRUCTION}\n\n{ENGLISH.strip()}"),
    ]
    assert (job.params.max_tokens, job.params.temperature, job.model) == (33, 0.0, "fake-model")
    assert (summary.tally.chunks, summary.tally.jobs, summary.tally.reused_jobs) == (1, 1, 0)
    assert (summary.tally.prompt_tokens, summary.tally.completion_tokens) == (100, 7)


async def test_a_long_document_is_mapped_and_reduced_in_order(server: Server, queue: str) -> None:
    text = make_text(30)
    async with serving(server.url, queue) as worker, summarizing(server, queue) as summarizer:
        summary = await summarizer.summarize(Document("long.txt", text))

    chunks = [job for job in worker.jobs if text_of(job).startswith("Sentence")]
    joined = [job for job in worker.jobs if text_of(job).startswith("Brief")]
    assert summary.tally.chunks == len(chunks) > 5
    assert summary.tally.jobs == len(worker.jobs) == len(chunks) + len(joined)
    assert len(joined) > 2, "several rounds"
    assert summary.text == brief(joined[-1])
    chunks.sort(key=lambda job: int(text_of(job).split()[2]))
    assert "".join(" ".join(map(text_of, chunks)).split()) == "".join(text.split())
    first, second = map(brief, chunks[:2])
    assert any(text_of(job).startswith(f"{first}\n\n{second}") for job in joined)
    assert all(COUNT(text_of(job)) <= 120 for job in worker.jobs)


async def test_all_jobs_share_a_prefix_that_the_worker_can_cache(server: Server, queue: str) -> None:
    async with serving(server.url, queue) as worker, summarizing(server, queue) as summarizer:
        await outcomes(summarizer, [Document("a", make_text(20)), Document("b", ENGLISH)])

    assert len(worker.jobs) > 4
    prefixes = {(job.messages or ())[0].content + (job.messages or ())[1].content[:48] for job in worker.jobs}
    assert len(prefixes) == 1


async def test_markup_is_left_out_unless_wanted(server: Server, queue: str) -> None:
    document = Document("a.md", "# Mill\n\nSee [the tide](https://example.org) ![badge](b.svg).\n")
    async with serving(server.url, queue) as worker:
        for markup in (False, True):
            options = SummaryOptions(markup=markup)
            async with summarizing(server, queue, options) as summarizer:
                await summarizer.summarize(document)

    assert [text_of(job) for job in worker.jobs] == ["Mill\n\nSee the tide .", document.text.strip()]


async def test_a_second_run_computes_nothing(server: Server, queue: str) -> None:
    documents = [Document("a", make_text(20)), Document("b", ENGLISH)]
    async with serving(server.url, queue) as worker:
        async with summarizing(server, queue) as summarizer:
            first = await outcomes(summarizer, documents)
        computed = len(worker.jobs)
        async with summarizing(server, queue) as summarizer:
            second = await outcomes(summarizer, documents)

    assert len(worker.jobs) == computed == summarizer.total.jobs == summarizer.total.reused_jobs
    assert summarizer.total.reused_tokens == summarizer.total.completion_tokens == 7 * computed
    assert {o.name: o.text for o in first if isinstance(o, Summary)} == {
        o.name: o.text for o in second if isinstance(o, Summary)
    }
    assert len(second) == 2


async def test_an_interrupted_run_is_continued_where_it_stopped(server: Server, queue: str) -> None:
    document = Document("long.txt", make_text(40))
    reached = asyncio.Event()

    def some(job: Job) -> str | None:
        if len(worker.jobs) > 3:
            reached.set()
            return None
        return brief(job)

    async with serving(server.url, queue, some) as worker:
        async with summarizing(server, queue) as summarizer:
            run = asyncio.create_task(outcomes(summarizer, [document]))
            await asyncio.wait_for(reached.wait(), 10)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
        worker.answer = brief
        async with summarizing(server, queue) as summarizer:
            rerun = asyncio.create_task(outcomes(summarizer, [document]))
            await worker.answer_held()
            (outcome,) = await asyncio.wait_for(rerun, 20)

    assert isinstance(outcome, Summary)
    assert set(worker.claims.values()) == {1}, "no job was run twice"
    assert outcome.tally.jobs == len(worker.jobs)
    assert 3 < outcome.tally.reused_jobs < outcome.tally.jobs


async def test_the_same_text_in_two_documents_is_computed_once(server: Server, queue: str) -> None:
    async with serving(server.url, queue) as worker, summarizing(server, queue) as summarizer:
        both = await outcomes(summarizer, [Document("a", ENGLISH), Document("b", ENGLISH)])

    assert len(worker.jobs) == 1
    assert [o.text for o in both if isinstance(o, Summary)] == [brief_of(ENGLISH.strip())] * 2


@pytest.mark.parametrize(
    "other",
    [
        SummaryOptions(max_tokens=41, chunk_tokens=120),
        SummaryOptions(max_tokens=40, chunk_tokens=120, instruction="Shorten this."),
        SummaryOptions(max_tokens=40, chunk_tokens=120, temperature=0.5),
        SummaryOptions(max_tokens=40, chunk_tokens=120, tenant="another"),
        SummaryOptions(max_tokens=40, chunk_tokens=120, scope="another"),
    ],
)
async def test_other_options_are_other_jobs(server: Server, queue: str, other: SummaryOptions) -> None:
    async with serving(server.url, queue) as worker:
        for options in (SMALL, other):
            async with summarizing(server, queue, options) as summarizer:
                await summarizer.summarize(Document("a", "The tide is high."))

    assert len(worker.claims) == 2


async def test_a_failed_part_fails_its_document_alone(server: Server, queue: str) -> None:
    def refuse(job: Job) -> str:
        if "number 12" in text_of(job):
            raise RuntimeError("the wheel is stuck")
        return brief(job)

    documents = (Document("bad", make_text(20)), Document("good", ENGLISH), Unreadable("gone", "empty"))
    async with serving(server.url, queue, refuse), summarizing(server, queue) as summarizer:
        found = {outcome.name: outcome for outcome in await outcomes(summarizer, documents)}

    assert found["gone"] == Failure("gone", "empty")
    assert isinstance(found["good"], Summary)
    bad = found["bad"]
    assert isinstance(bad, Failure)
    assert bad.reason.startswith("job summary-")
    assert bad.reason.endswith(": the wheel is stuck")


async def test_a_failure_of_an_earlier_run_is_tried_again(server: Server, queue: str) -> None:
    def refuse(job: Job) -> str:
        raise RuntimeError("stuck")

    document = Document("a", "The tide is high.")
    async with serving(server.url, queue, refuse) as worker:
        for runs in (1, 2):
            async with summarizing(server, queue) as summarizer:
                assert isinstance((await outcomes(summarizer, [document]))[0], Failure)
            assert len(worker.jobs) == runs, "once per run"
        worker.answer = brief
        async with summarizing(server, queue) as summarizer:
            (outcome,) = await outcomes(summarizer, [document])

    assert isinstance(outcome, Summary)
    assert outcome.tally.reused_jobs == 0


async def test_summaries_come_in_order_of_completion(server: Server, queue: str) -> None:
    documents = [Document("long", make_text(40)), Document("short", ENGLISH)]
    async with serving(server.url, queue), summarizing(server, queue) as summarizer:
        found = await outcomes(summarizer, documents)

    assert [outcome.name for outcome in found] == ["short", "long"]


async def test_documents_and_jobs_in_flight_are_bounded(server: Server, queue: str) -> None:
    """Given many documents, when they are summarized, then only a window of them is held."""
    ahead = peak_ahead = 0

    def documents() -> Iterator[Document]:
        nonlocal ahead, peak_ahead
        for number in range(100):
            ahead += 1
            peak_ahead = max(peak_ahead, ahead)
            yield Document(str(number), f"Sentence {number} is short. " * 30)

    async with serving(server.url, queue) as worker, summarizing(server, queue, window=8) as summarizer:
        num_done = 0
        async for outcome in summarizer.summarize_all(documents()):
            assert isinstance(outcome, Summary)
            num_done += 1
            ahead -= 1

    assert num_done == 100
    assert peak_ahead <= 16
    assert 0 < worker.peak <= 8


async def test_a_full_queue_is_waited_out(server: Server, queue: str) -> None:
    settings = ClientSettings(queue=QueueSettings(max_depth=2))
    async with serving(server.url, queue), Client(server.url, queue=queue, settings=settings) as client:
        summarizer = Summarizer(client, make_card(), SMALL)
        found = await outcomes(summarizer, [Document("a", make_text(20))])

    assert isinstance(found[0], Summary)


async def test_a_queue_that_stays_full_ends_the_run_when_the_time_is_over(server: Server, queue: str) -> None:
    settings = ClientSettings(queue=QueueSettings(max_depth=1))
    async with Client(server.url, queue=queue, settings=settings) as client:
        await client.submit(Job(prompt="in the way"))
        summarizer = Summarizer(client, make_card(), SMALL, wait_for_room=0.1)
        with pytest.raises(QueueFull):
            await outcomes(summarizer, [Document("a", ENGLISH)])


async def test_a_job_that_can_never_be_submitted_fails_its_document(server: Server, queue: str) -> None:
    settings = ClientSettings(queue=QueueSettings(max_payload=600))
    async with serving(server.url, queue), Client(server.url, queue=queue, settings=settings) as client:
        summarizer = Summarizer(client, make_card(), SMALL)
        found = await outcomes(summarizer, [Document("a", ENGLISH), Document("b", "The tide is high.")])

    reasons = {o.name: o.reason if isinstance(o, Failure) else "" for o in found}
    assert "at most 600 are allowed" in reasons["a"]
    assert reasons["b"] == ""


async def test_a_job_whose_data_was_lost_is_submitted_again(server: Server, queue: str) -> None:
    """Given a server that loses a running job, when its result is awaited, then it is run again."""

    def lose(job: Job) -> str | None:
        if len(worker.jobs) > 1:
            return brief(job)
        with server.client() as redis:
            redis.delete(*redis.keys(f"tidemill:{{{queue}}}:job*"))
        return None

    async with serving(server.url, queue, lose) as worker, summarizing(server, queue) as summarizer:
        summary = await asyncio.wait_for(summarizer.summarize(Document("a", "The tide is high.")), 20)

    assert summary.text == brief_of("The tide is high.")


async def test_loops_and_cut_off_sentences_of_small_models_are_tidied(server: Server, queue: str) -> None:
    def loop(job: Job) -> str:
        return "The tide is high. The mill turns. The mill turns.\nThe mill turns.\n"

    async with serving(server.url, queue, loop), summarizing(server, queue) as summarizer:
        summary = await summarizer.summarize(Document("a", ENGLISH))

    assert summary.text == "The tide is high. The mill turns."


@pytest.mark.parametrize("reply", ["", " \n"])
async def test_a_model_that_writes_nothing_is_a_failure(server: Server, queue: str, reply: str) -> None:
    async with serving(server.url, queue, lambda _: reply), summarizing(server, queue) as summarizer:
        with pytest.raises(SummaryFailed, match="the model wrote nothing"):
            await summarizer.summarize(Document("a", make_text(20)))


async def test_a_summary_longer_than_asked_for_still_reduces(server: Server, queue: str) -> None:
    """Given a model that ignores its limit, when summaries are joined, then they are shortened to fit."""
    async with (
        serving(server.url, queue, lambda job: f"{text_of(job)[:20]} " + ENGLISH * 3) as worker,
        summarizing(server, queue) as summarizer,
    ):
        await asyncio.wait_for(summarizer.summarize(Document("a", make_text(20))), 20)

    assert all(COUNT(text_of(job)) <= 120 for job in worker.jobs)


async def test_a_queue_that_nobody_serves_is_named(server: Server, queue: str) -> None:
    said: list[str] = []
    async with Client(server.url, queue=queue) as client:
        with pytest.raises(QueueUnavailable, match=f"no worker serves queue {queue}"):
            await await_card(client, timeout=0.1, on_wait=said.append)
    assert said == [f"no worker serves queue {queue} yet; waiting up to 0.1 s"]


async def test_a_worker_that_comes_later_is_waited_for(server: Server, queue: str) -> None:
    waiting = asyncio.Event()
    async with Client(server.url, queue=queue) as client:
        card = asyncio.create_task(await_card(client, timeout=20, on_wait=lambda _: waiting.set()))
        await waiting.wait()
        async with serving(server.url, queue):
            assert (await card).model == "fake-model"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SummaryOptions(max_tokens=0), "max_tokens must be at least 1"),
        (lambda: SummaryOptions(chunk_tokens=31), "chunk_tokens must be at least 32"),
        (lambda: SummaryOptions(instruction=" "), "instruction must not be empty"),
        (lambda: fit(SummaryOptions(max_tokens=100, chunk_tokens=215)), "chunk_tokens must be from 216 to"),
        (lambda: fit(SummaryOptions(max_tokens=100, chunk_tokens=1900)), "chunk_tokens must be from 216 to"),
        (lambda: fit(SummaryOptions(max_tokens=1000)), "max_tokens of 1000 leaves"),
        (lambda: fit(SummaryOptions(), max_total_tokens=300), "of the 300 tokens"),
        (lambda: fit(SummaryOptions(), tokenizer_zlib=b""), "published no tokenizer"),
    ],
)
def test_options_that_cannot_work_say_why(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def fit(options: SummaryOptions, **card: object) -> Summarizer:
    return Summarizer(Client(queue="unused"), make_card(**card), options)


async def test_closing_early_leaves_no_task_behind(server: Server, queue: str) -> None:
    async with serving(server.url, queue), summarizing(server, queue) as summarizer:
        before = asyncio.all_tasks()
        documents = [Document(str(n), make_text(10 + n)) for n in range(5)]
        async with aclosing(summarizer.summarize_all(documents)) as found:
            await anext(found)
        left = {task for task in asyncio.all_tasks() - before if "Summarizer" in repr(task.get_coro())}

    assert not left
