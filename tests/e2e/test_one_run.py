"""99 good jobs and one of each bad kind, in one run of one worker: every one gets its own answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.e2e.bad_jobs import (
    GARBAGE,
    BadJob,
    beyond_the_model,
    outside_the_contract,
    stand_in,
    unreadable,
)
from tests.e2e.conftest import QUEUE
from tests.e2e.oracle import Answer, Oracle
from tests.e2e.polling import until
from tests.e2e.processes import Worker
from tests.tidemill.audit import Audit
from tests.tidemill.servers import Server
from tests.worker.model.texts import paragraphs
from tidemill.client import Client
from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import WIRE_VERSION, Job, Priority, Result, Status
from tidemill.keys import DEFAULT_RESULTS, JobField, QueueKeys
from tidemill.params import SamplingParams
from tidemill.queue import Queue
from tidemill.submission import batched

NUM_GOOD = 99
YEAR = {"type": "object", "properties": {"y": {"enum": [1999, 2024]}}, "required": ["y"]}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.0, "stop": [" the", "\n"]},
    {"temperature": 1.2, "stop_token_ids": [28, 30], "ignore_eos": True},
    {"temperature": 0.9, "n": 3, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1, "echo": True},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {"28": 3.5}, "bad_words": ["the", "Paris"]},
    {"temperature": 0.0, "stop": ["e"], "include_stop_str_in_output": True, "min_tokens": 4},
    {"temperature": 0.0, "truncate_prompt_tokens": 5, "skip_special_tokens": False},
    {"temperature": 0.8, "structured_outputs": {"regex": "[a-f]{3,9}"}},
    {"temperature": 0.0, "structured_outputs": {"choice": ["yes", "no"]}},
    {"temperature": 0.8, "n": 2, "response_format": {"type": "json_schema", "json_schema": {"schema": YEAR}}},
]
"""Every parameter there is; `max_tokens` and `seed` come on top."""
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
pytestmark = pytest.mark.timeout(180)


def good_jobs(oracle: Oracle) -> list[Job]:
    """Everything a job may ask for, on text that nobody here wrote."""
    inputs = _inputs(oracle)
    return [_job(number, next(inputs)) for number in range(NUM_GOOD)]


def _inputs(oracle: Oracle) -> Iterator[dict[str, Any]]:
    for text in paragraphs():
        yield {"prompt": text[:200]}
        yield {"messages": [{"role": "user", "content": text[:150]}]}
        yield {"messages": CAPITAL}
        yield {"prompt_token_ids": oracle.tokenizer.prompt_token_ids(Job(prompt=text[:100]))}


def _job(number: int, given: dict[str, Any]) -> Job:
    params = {"max_tokens": 8 + number % 5, "seed": number, **KINDS[number % len(KINDS)]}
    return Job.parse(
        {
            "id": f"good-{number}",
            "model": QUEUE if number % 2 else None,
            "params": params,
            "priority": list(Priority)[number % 3],
            "tenant": f"tenant-{number % 2}",
            "stream": number % 10 == 0,
            "metadata": {"number": str(number)},
            **given,
        }
    )


async def submit(client: Client, server: Server, good: Sequence[Job], bad: Sequence[BadJob]) -> None:
    """Good and bad, mixed; the bad payloads take the place of others, which no SDK would do."""
    portions = list(batched(good, 8))
    for index, portion in enumerate(portions):
        jobs = [*portion, *map(stand_in, bad[index :: len(portions)])]
        assert await client.submit_batch(jobs) == [job.id for job in jobs]
    keys = QueueKeys(client.queue)
    with server.client() as redis:
        for one in bad:
            redis.hset(keys.job(one.id), JobField.PAYLOAD, one.payload)
        for garbage in GARBAGE:
            redis.xadd(keys.jobs(WIRE_VERSION, Priority.NORMAL, "default"), garbage)


def assert_right(result: Result, job: Job, answer: Answer, oracle: Oracle) -> None:
    assert result.status is Status.SUCCEEDED, result
    assert Answer.of(result) == answer
    assert (result.attempts, result.metadata, result.error) == (1, job.metadata, None)
    params, prompt = job.params, oracle.tokenizer.prompt_token_ids(job)
    assert [choice.index for choice in result.choices] == list(range(params.n))
    assert all(len(choice.token_ids) <= params.max_tokens for choice in result.choices)
    assert result.usage.completion_tokens == sum(len(choice.token_ids) for choice in result.choices)
    assert result.usage.prompt_tokens == len(prompt)
    if result.finish_reason == "length" and params.skip_special_tokens and not params.echo:
        assert result.text == oracle.tokenizer.decode(result.token_ids)
    if params.logprobs is not None:
        assert all(len(choice.logprobs or ()) == len(choice.token_ids) for choice in result.choices)
    if params.prompt_logprobs is not None:
        assert len(result.prompt_logprobs or ()) == len(prompt)
    if job.messages and job.messages[0].content == CAPITAL[0]["content"] and params == plain(params):
        assert result.text.startswith("The capital of France is Paris")


def plain(params: SamplingParams) -> SamplingParams:
    """Greedy, and nothing else asked for."""
    return SamplingParams(max_tokens=params.max_tokens, seed=params.seed, temperature=0.0)


def assert_refused(result: Result, bad: BadJob) -> None:
    assert (result.status, result.text, result.token_ids) == (Status.FAILED, "", ())
    error = result.error
    assert error is not None
    assert (bad.kind, error.code, error.field, error.limit) == (bad.kind, bad.code, bad.field, bad.limit)
    assert bad.says in error.message
    assert "\n" not in error.message
    assert bad.field is None or error.message.startswith(f"{bad.field}: ")


async def test_every_job_gets_its_own_answer(
    server: Server, worker: Worker, oracle: Oracle, client: Client, queue: Queue
) -> None:
    card = await client.model_card()
    assert card is not None
    good = good_jobs(oracle)
    bad = [*outside_the_contract(), *unreadable(), *beyond_the_model(card, oracle.tokenizer.vocab_size)]

    worker.pause()
    await submit(client, server, good, bad)
    worker.go_on()
    ids = [job.id for job in good] + [one.id for one in bad]
    results = {result.id: result async for result in client.as_completed(ids, timeout=120)}
    deltas = {job.id: [delta async for delta in client.stream(job.id)] for job in good if job.stream}

    answers = oracle.answers(good)
    for job in good:
        assert_right(results[job.id], job, answers[job.id], oracle)
    for one in bad:
        assert_refused(results[one.id], one)
    assert all(worker.did(result) for result in results.values())
    for job_id, pieces in deltas.items():
        for choice in results[job_id].choices:
            own = [piece for piece in pieces if piece.choice == choice.index]
            assert "".join(piece.text for piece in own) == choice.text
            assert sum((piece.token_ids for piece in own), ()) == choice.token_ids

    # The entries without a job: nobody can be told but whoever reads the default stream.
    # A full worker comes upon them after the last job.
    async def all_refused() -> bool:
        return len(await queue.results(DEFAULT_RESULTS)) >= len(GARBAGE)

    await until(all_refused)
    refused = [result for _, result in await queue.results(DEFAULT_RESULTS)]
    assert len(refused) == len(GARBAGE)
    assert "nobody-submitted-this" in {result.id for result in refused}
    assert {result.error.code for result in refused if result.error} == {ErrorCode.UNDECODABLE}

    # Nothing is left over, and nobody was answered twice.
    answered = Counter(result.id for _, result in await queue.results(client.results, count=1000))
    assert answered == Counter(ids)
    depth = await client.depth()
    assert (depth.total, depth.running, depth.dead_letters) == (0, 0, 0)
    with server.client() as redis:
        assert Audit(redis, queue.keys.prefix).run() == []
    await until(lambda: worker.metric("tidemill_requests_running") == 0)
    assert worker.metric("tidemill_kv_cache_usage_ratio") == 0
    assert worker.metric("tidemill_requests_waiting") == 0
    assert worker.metric("tidemill_prefix_cache_queries_total") > 0
    assert worker.metric("tidemill_swap_cache_queries_total") == 0  # there is no swap space
    assert worker.is_alive


@pytest.mark.parametrize("bad", outside_the_contract(), ids=lambda bad: bad.kind)
def test_the_sdk_refuses_what_the_worker_would(bad: BadJob) -> None:
    with pytest.raises(InvalidJob) as refused:
        Job.parse(json.loads(bad.payload))
    assert (refused.value.field, refused.value.limit) == (bad.field, bad.limit)
    assert bad.says in str(refused.value)
