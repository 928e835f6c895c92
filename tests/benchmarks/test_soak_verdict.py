"""The soak's verdict finds what is lost, duplicated and wrong, and nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from soak_load import TEMPLATE, Sent
from soak_verdict import PAGE, Evidence, Verdict, events, judge

from tests.tidemill.factories import REPLY, WORKER, make_job, make_settings, submit
from tests.tidemill.servers import Server
from tidemill.connection import connect
from tidemill.errors import ErrorCode
from tidemill.jobs import Choice, ErrorInfo, FinishReason, Job, JobId, Result, Status, Usage
from tidemill.keys import QueueKeys
from tidemill.queue import Queue

TEXT = "the tide"
USAGE = Usage(prompt_tokens=3, completion_tokens=len(TEXT))


def make_sent(name: str = "a", **fields: Any) -> Sent:
    job = Job(id=JobId(name), prompt="x", metadata={TEMPLATE: "0"})
    return Sent(job, **{"is_accepted": True, **fields})


def make_answer(name: str = "a", *, text: str = TEXT, **fields: Any) -> Result:
    complete: dict[str, Any] = {
        "status": Status.SUCCEEDED,
        "finish_reason": FinishReason.STOP,
        "usage": USAGE,
        "metadata": {TEMPLATE: "0"},
        **fields,
    }
    return Result(id=JobId(name), text=text, token_ids=tuple(map(ord, text)), **complete)


def verdict_of(*answers: Result, sent: Sent | None = None, reference: Result | None = None) -> Verdict:
    one = sent or make_sent()
    read = {answer.id for answer in answers}
    return judge({one.job.id: one}, answers, [reference or make_answer("undisturbed")], read)


def cut_short(text: str, **fields: Any) -> Result:
    """As a cancelled job is answered."""
    return make_answer(text=text, status=Status.CANCELLED, finish_reason=FinishReason.CANCELLED, **fields)


def test_what_was_answered_once_and_as_undisturbed_is_clean() -> None:
    verdict = verdict_of(make_answer(worker="another", attempts=3))
    assert verdict.is_clean
    assert verdict.suspects == []
    assert verdict.statuses == {Status.SUCCEEDED: 1}
    assert verdict.num_tokens == len(TEXT)


def test_an_accepted_job_without_an_answer_is_lost() -> None:
    verdict = verdict_of()
    assert verdict.lost == ["a"]
    assert verdict.reason(JobId("a")) == "lost"
    assert not verdict.is_clean


def test_a_job_that_was_never_accepted_is_owed_nothing() -> None:
    assert verdict_of(sent=make_sent(is_accepted=False)).is_clean


def test_each_further_answer_is_a_duplicate_even_if_it_is_the_same() -> None:
    verdict = verdict_of(make_answer(), make_answer(), make_answer(text="other"))
    assert verdict.duplicated == ["a", "a"]
    assert verdict.suspects == ["a"]
    assert not verdict.is_clean


@pytest.mark.parametrize(
    ("answer", "sent", "reason"),
    [
        (make_answer("b"), make_sent(is_accepted=False), "nobody submitted"),
        (make_answer(text="the tidf"), make_sent(), "not those of the undisturbed run"),
        (make_answer(finish_reason=FinishReason.LENGTH), make_sent(), "not those of the undisturbed run"),
        (make_answer(alternatives=(Choice(index=1),)), make_sent(), "not those of the undisturbed run"),
        (make_answer(status=Status.EXPIRED), make_sent(), "expired, undisturbed succeeded"),
        (cut_short("the"), make_sent(), "cancelled, undisturbed succeeded"),
        (cut_short("The"), make_sent(is_cancelled=True), "does not begin as"),
        (make_answer(usage=Usage(prompt_tokens=3, completion_tokens=9)), make_sent(), "12 tokens used"),
        (make_answer(metadata={}), make_sent(), "metadata"),
        (make_answer(), make_sent(streamed={0: "the tid"}), "stream told another text"),
        (make_answer(), make_sent(awaited=make_answer(worker="x")), "given another answer"),
        (make_answer(), make_sent(complaint="the wait for it did not end"), "did not end"),
    ],
)
def test_an_answer_that_differs_is_wrong(answer: Result, sent: Sent, reason: str) -> None:
    verdict = verdict_of(answer, sent=sent)
    assert list(verdict.wrong) == [answer.id]
    assert reason in verdict.reason(answer.id)
    assert not verdict.is_clean


def test_a_refusal_must_be_the_same_refusal() -> None:
    def refused(field: str) -> Result:
        error = ErrorInfo(code=ErrorCode.INVALID_REQUEST, message="no", field=field)
        return make_answer(text="", status=Status.FAILED, error=error)

    assert verdict_of(refused("prompt"), reference=refused("prompt")).is_clean
    assert not verdict_of(refused("prompt"), reference=refused("model")).is_clean


@pytest.mark.parametrize("text", ["", "the", TEXT, "the t\ufffd", "the i"])
def test_a_cancelled_job_has_a_beginning_of_its_text_but_for_what_was_held_back(text: str) -> None:
    answer = cut_short(text).model_copy(update={"token_ids": tuple(map(ord, TEXT))[: len(text) - 1]})
    assert verdict_of(answer, sent=make_sent(is_cancelled=True)).is_clean


def test_a_cancellation_that_came_too_late_changes_nothing() -> None:
    assert verdict_of(make_answer(), sent=make_sent(is_cancelled=True)).is_clean
    assert not verdict_of(make_answer(text="x"), sent=make_sent(is_cancelled=True)).is_clean


def test_a_job_that_was_given_up_is_not_clean() -> None:
    error = ErrorInfo(code=ErrorCode.ATTEMPTS_EXHAUSTED, message="given up")
    verdict = verdict_of(make_answer(text="the", status=Status.FAILED, error=error))
    assert verdict.buried == ["a"]
    assert verdict.wrong == {}
    assert verdict.reason(JobId("a")) == "given up"
    assert not verdict.is_clean


def test_an_answer_that_its_reader_was_not_given_is_not_clean() -> None:
    one = make_sent()
    verdict = judge({one.job.id: one}, [make_answer()], [make_answer()], read=())
    assert "was not given this one" in verdict.reason(one.job.id)
    assert not verdict.is_clean


def test_somebody_who_was_let_down_counts_even_if_there_was_never_an_answer() -> None:
    verdict = verdict_of(sent=make_sent(is_accepted=False, complaint="its submission did not end"))
    assert verdict.wrong == {"a": "its submission did not end"}
    assert not verdict.is_clean


def test_a_stream_is_compared_generation_by_generation() -> None:
    answer = make_answer(alternatives=(Choice(index=1, text="ebb"), Choice(index=2)))
    whole = {0: TEXT, 1: "ebb"}
    assert verdict_of(answer, sent=make_sent(streamed=whole), reference=answer).is_clean
    assert not verdict_of(answer, sent=make_sent(streamed={0: TEXT}), reference=answer).is_clean


def test_the_events_of_a_job_are_the_lines_that_name_it(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text("event=claimed job=soak-1\nevent=claimed job=soak-2\n")
    assert events(JobId("soak-2"), [log]) == ["worker-0.log: event=claimed job=soak-2"]


@pytest.fixture
def client(valkey: Server) -> Iterator[redis.Redis]:
    with valkey.client() as made:
        yield made


@pytest.fixture
def queue_name() -> str:
    return uuid.uuid4().hex


def test_answers_are_read_from_first_to_last(client: redis.Redis, queue_name: str) -> None:
    names = [f"j{number}" for number in range(PAGE + 2)]
    for name in names:
        client.xadd(QueueKeys(queue_name).results("all"), {"id": name, "result": make_answer(name).to_wire()})
    assert [answer.id for answer in Evidence(client, queue_name).answers("all")] == names


async def test_what_is_left_over_is_named(valkey: Server, client: redis.Redis, queue_name: str) -> None:
    evidence = Evidence(client, queue_name)
    async with connect(valkey.url) as connection:
        queue = Queue(connection, queue_name, make_settings())
        await queue.set_weight("ann", 2.0)
        assert evidence.left_over() == []

        await submit(queue, make_job("a"), make_job("b"))
        await queue.claim(WORKER, 1)
        left = "\n".join(evidence.left_over())
        assert "leases has no expiry" in left
        assert "has 2 entries, 1 of them pending" in left
        await queue.aclose()


async def test_tokens_of_a_checkpoint_count_once_the_job_was_resumed(
    valkey: Server, client: redis.Redis, queue_name: str
) -> None:
    async with connect(valkey.url) as connection:
        queue = Queue(connection, queue_name, make_settings())
        await queue.submit([make_job("a"), make_job("b")], reply_to=REPLY)
        client.hset(QueueKeys(queue_name).job(JobId("a")), "base", 7)
        evidence = Evidence(client, queue_name)
        assert evidence.resumed_tokens([JobId("a"), JobId("b"), JobId("unknown")]) == 7
        assert evidence.job(JobId("a"))["base"] == "7"
        await queue.aclose()
