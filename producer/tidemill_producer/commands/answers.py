"""`tidemill result`, `status` and `cancel`: what became of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.blocking import BlockingClient
from tidemill.client import DEFAULT_URL
from tidemill.errors import JobUnknown
from tidemill.jobs import JobId
from tidemill.moves import CancelOutcome
from tidemill_producer.commands.options import (
    AsJson,
    JobIdArgument,
    QueueName,
    RedisUrl,
    Timeout,
    print_fields,
    print_json,
    print_result,
    view_as_json,
)


def result(
    *,
    job_id: JobIdArgument,
    queue: QueueName,
    redis_url: RedisUrl = DEFAULT_URL,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the result if there is none yet.")] = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Print the result of a job: its text, or all of it with --json.

    Without --wait or --timeout, a job that is not finished yet ends this with exit status 5.
    """
    limit = timeout if wait or timeout is not None else 0.0
    with BlockingClient(redis_url, queue=queue) as client:
        answer = client.result(JobId(job_id), timeout=limit)
    raise typer.Exit(print_result(answer, as_json=as_json))


def status(
    job_id: JobIdArgument, queue: QueueName, redis_url: RedisUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Show where a job is: its state, attempt, worker, and times in milliseconds of Redis's clock."""
    with BlockingClient(redis_url, queue=queue) as client:
        view = view_as_json(client.status(JobId(job_id)))
    if as_json:
        print_json(view)
    else:
        print_fields(view)


def cancel(
    job_id: JobIdArgument, queue: QueueName, redis_url: RedisUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Cancel a job and print what that did.

    `cancelled`: it was not running, and has its result now. `requested`: it is running; its worker
    stops at the next renewal of its lease. `finished`: it had a result already, which stands.
    """
    with BlockingClient(redis_url, queue=queue) as client:
        outcome = client.cancel(JobId(job_id))
    if outcome is CancelOutcome.UNKNOWN:
        raise JobUnknown(f"job {job_id} is unknown in queue {queue}, or its result has expired")
    if as_json:
        print_json({"id": job_id, "outcome": outcome})
    else:
        print(outcome)
