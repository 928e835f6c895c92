"""The soak's jobs are of all kinds, and its clients keep the queue full and read what comes out."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator
from unittest.mock import Mock

import pytest
from soak_load import TEMPLATE, Load, insist, make_templates

from tests.tidemill.echo_worker import echo_worker, open_queue
from tests.tidemill.servers import Server
from tidemill.client import Client
from tidemill.errors import JobUnknown, QueueUnavailable
from tidemill.jobs import Delta, Job, JobId, Result
from tidemill.moves import CancelOutcome

AHEAD = 20


def test_the_seed_decides_over_templates() -> None:
    def contents(seed: int) -> list[dict[str, object]]:
        return [job.model_dump(exclude={"id"}) for job in make_templates(20, seed=seed)]

    assert contents(1) == contents(1)
    assert contents(1) != contents(2)


def test_templates_are_of_all_kinds_and_say_which_they_are() -> None:
    templates = make_templates(40, seed=0)
    assert [job.metadata[TEMPLATE] for job in templates] == [str(i) for i in range(len(templates))]
    params = [job.params for job in templates]
    assert any(one.temperature == 0 for one in params)
    assert any(one.n > 1 for one in params)
    assert any(one.stop for one in params)
    assert any(one.logprobs is not None for one in params)
    assert any(job.messages for job in templates)
    assert any(job.model == "another" for job in templates)


def test_an_answer_never_depends_on_the_dice_of_a_submission() -> None:
    valid = [job for job in make_templates(40, seed=0) if job.model is None and job.params.max_tokens < 1000]
    assert all(job.params.seed is not None for job in valid if job.prompt_token_ids is None)


class Forgetful(Client):
    """Knows no job that it is asked to cancel."""

    async def cancel(self, job_id: JobId) -> CancelOutcome:
        return CancelOutcome.UNKNOWN


class Refusing(Client):
    """Knows no job that it is asked to wait for."""

    async def result(self, job_id: JobId, *, timeout: float | None = None) -> Result:
        raise JobUnknown(f"job {job_id} is unknown")


class Silent(Client):
    """Lets everybody wait for ever who waits, or reads along."""

    async def result(self, job_id: JobId, *, timeout: float | None = None) -> Result:
        return await asyncio.Future()

    async def stream(self, job_id: JobId, *, timeout: float | None = None) -> AsyncGenerator[Delta, None]:
        yield await asyncio.Future()


async def drive(valkey: Server, kind: type[Client], *, jobs: int, is_endless: bool = False) -> Load:
    """Let a load run until so many jobs are answered, then to its end.

    Args:
        is_endless: something that it has begun does not end, and is given up when all is answered.
    """
    name = uuid.uuid4().hex
    templates = [Job(prompt=text, metadata={TEMPLATE: "0"}) for text in ("tide", "mill")]
    async with kind(valkey.url, queue=name) as client, open_queue(valkey.url, name) as queue:
        load = Load(client, queue, templates, random.Random(0), ahead=AHEAD, delay=0.05)
        with echo_worker(valkey.url, name):
            reading = asyncio.create_task(load.read())
            producing = asyncio.create_task(load.run())
            async with asyncio.timeout(60):
                while len(load.seen) < jobs:
                    assert load.num_unanswered <= AHEAD
                    await asyncio.sleep(0.01)
                load.stop()
                if not is_endless:
                    await producing
                await load.until_answered()
            producing.cancel()
            reading.cancel()
            await asyncio.gather(producing, reading, return_exceptions=True)
    return load


async def test_the_queue_is_kept_full_and_everything_is_read(valkey: Server) -> None:
    load = await drive(valkey, Client, jobs=10 * AHEAD)
    sent = load.sent.values()
    assert load.seen == set(load.sent)
    assert all(one.is_accepted and not one.complaint for one in sent)
    assert any(one.is_cancelled for one in sent)
    assert any(one.streamed == {0: one.job.prompt} for one in sent)
    assert any(one.awaited is not None and one.awaited.id == one.job.id for one in sent)


@pytest.mark.parametrize(
    ("kind", "what"), [(Forgetful, "its cancellation: unknown"), (Refusing, "the wait for it: JobUnknown")]
)
async def test_a_refusal_is_noted_at_the_job_and_ends_nothing(
    valkey: Server, kind: type[Client], what: str
) -> None:
    load = await drive(valkey, kind, jobs=10 * AHEAD)
    complaints = [one.complaint for one in load.sent.values() if one.complaint]
    assert load.seen == set(load.sent)
    assert complaints
    assert all(complaint.startswith(what) for complaint in complaints)


async def test_whoever_waits_for_ever_is_noted_at_the_job(valkey: Server) -> None:
    load = await drive(valkey, Silent, jobs=10 * AHEAD, is_endless=True)
    complaints = {one.complaint for one in load.sent.values() if one.complaint}
    assert complaints == {"the wait for it did not end", "its stream did not end"}


async def test_a_submission_that_never_ends_is_noted_at_its_jobs() -> None:
    client = Mock(submit_batch=Mock(side_effect=lambda jobs: asyncio.Future()))
    load = Load(client, Mock(), make_templates(8, seed=0), random.Random(0), ahead=AHEAD)
    producing = asyncio.create_task(load.run())
    while not client.submit_batch.called:
        await asyncio.sleep(0)
    producing.cancel()
    await asyncio.gather(producing, return_exceptions=True)
    assert {one.complaint for one in load.sent.values()} == {"its submission did not end"}


async def test_an_absent_server_is_asked_again() -> None:
    answers = [QueueUnavailable("away"), QueueUnavailable("away"), None]

    async def operation() -> str:
        if error := answers.pop(0):
            raise error
        return "there"

    assert await insist(operation) == "there"
