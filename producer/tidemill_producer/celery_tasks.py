"""Celery tasks over the queue: `tidemill.generate` and `tidemill.summarize`.

Include this module in an application of your own:

    app = Celery("shop", include=["tidemill_producer.celery_tasks"])
    app.conf.tidemill_queue = "SmolLM2-135M-Instruct"

Both tasks may be delivered any number of times. The id of a job is a digest of the task's id, so that
a second delivery finds the job of the first, or its result, and nothing is generated twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from celery import Task, shared_task
from celery.signals import task_revoked

from tidemill.client import Client
from tidemill.errors import QueueFull, QueueUnavailable, TidemillError
from tidemill.jobs import Job, JobId, Result, Status
from tidemill_producer.cancellation import run_interruptibly
from tidemill_producer.documents import Document
from tidemill_producer.settings import CelerySettings, celery_settings
from tidemill_producer.summarize import Summarizer, await_card
from tidemill_producer.summary import Summary, SummaryFailed, SummaryOptions

GENERATE = "tidemill.generate"
SUMMARIZE = "tidemill.summarize"
TASK_WINDOW = 32
"""Jobs that one task has in flight at most: what is wasted if it is killed without a word."""
CANCEL_TIMEOUT = 2.0

RETRY_SAFE: Mapping[str, Any] = {
    "acks_late": True,
    "reject_on_worker_lost": True,
    "autoretry_for": (QueueUnavailable, QueueFull),
    "retry_backoff": True,
    "retry_backoff_max": 60,
    "max_retries": 10,
}
"""Late acknowledgement costs nothing here: what was generated is found again."""


class GenerationFailed(TidemillError):
    """A job was answered with an error. The message is all there is: Celery rebuilds this from it."""


@shared_task(name=GENERATE, bind=True, **RETRY_SAFE)  # type: ignore[untyped-decorator]  # celery has no types
def generate(self: Task, *, tidemill_queue: str | None = None, **fields: Any) -> dict[str, Any]:
    """Run one job and return its result as a dict.

    `fields` are those of a `Job`: `prompt` or `messages`, `params`, `priority`, `tenant` and so on;
    `tidemill_queue` is the queue, if not the configured one.

    Raises:
        InvalidJob: naming the field that is wrong.
        GenerationFailed: the job failed, was cancelled or expired.
    """
    settings = celery_settings(self.app.conf, queue=tidemill_queue)
    name = task_digest(self.request.id)
    job = Job.parse(fields if name is None or "id" in fields else fields | {"id": name})
    result = run_interruptibly(_generate(settings, job, results=name))
    if result.status is not Status.SUCCEEDED:
        reason = f"{result.error.code}: {result.error.message}" if result.error else result.status.value
        raise GenerationFailed(f"job {result.id}: {reason}")
    return result.model_dump(mode="json")


@shared_task(name=SUMMARIZE, bind=True, **RETRY_SAFE)  # type: ignore[untyped-decorator]  # celery has no types
def summarize(self: Task, text: str, *, tidemill_queue: str | None = None, **options: Any) -> dict[str, Any]:
    """Summarize a text of any length; returns the summary and what it took.

    `options` are those of `SummaryOptions`: `max_tokens`, `instruction`, `chunk_tokens` and so on;
    `tidemill_queue` is the queue, if not the configured one.

    Raises:
        ConfigurationError: the options do not fit the model.
        SummaryFailed: a part of the text could not be summarized.
    """
    settings = celery_settings(self.app.conf, queue=tidemill_queue)
    name = task_digest(self.request.id)
    wanted = SummaryOptions(**({"scope": name or ""} | options))
    summary = run_interruptibly(_summarize(settings, text, wanted, results=name))
    return {"summary": summary.text, **asdict(summary.tally)}


def task_digest(task_id: str | None) -> str | None:
    """What a task's job and its result stream are called; `None` outside a task."""
    if task_id is None:
        return None
    return f"celery-{hashlib.blake2b(task_id.encode(), digest_size=16).hexdigest()}"


@task_revoked.connect  # type: ignore[untyped-decorator]  # celery has no types
def cancel_revoked(sender: Task, request: Any, **_: object) -> None:
    """A revoked `generate` needs no answer. Runs in the Celery worker, whose child may be killed."""
    if sender.name == GENERATE:
        kwargs = request.kwargs or {}
        settings = celery_settings(sender.app.conf, queue=kwargs.get("tidemill_queue"))
        job_id = JobId(kwargs.get("id") or str(task_digest(request.id)))
        run_interruptibly(_cancel(settings, job_id))


async def _generate(settings: CelerySettings, job: Job, *, results: str | None) -> Result:
    async with Client(settings.redis_url, queue=settings.queue, results=results) as client:
        try:
            await client.submit(job)
            return await client.result(job.id)
        except asyncio.CancelledError:
            await client.cancel(job.id)
            raise


async def _summarize(
    settings: CelerySettings, text: str, options: SummaryOptions, *, results: str | None
) -> Summary:
    async with Client(settings.redis_url, queue=settings.queue, results=results) as client:
        card = await await_card(client, timeout=settings.wait)
        summarizer = Summarizer(client, card, options, window=TASK_WINDOW)
        try:
            return await summarizer.summarize(Document("text", text))
        except (asyncio.CancelledError, SummaryFailed):
            await summarizer.cancel()
            raise


async def _cancel(settings: CelerySettings, job_id: JobId) -> None:
    async with asyncio.timeout(CANCEL_TIMEOUT), Client(settings.redis_url, queue=settings.queue) as client:
        await client.cancel(job_id)
