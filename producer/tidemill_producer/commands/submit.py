"""`tidemill submit`: one job from the command line, or many from a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tidemill.blocking import BlockingClient
from tidemill.client import DEFAULT_URL
from tidemill.errors import InvalidJob
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Job, JobId, Priority
from tidemill_producer.commands.jobs_file import JobsFile
from tidemill_producer.commands.options import (
    AsJson,
    QueueName,
    RedisUrl,
    Timeout,
    complain,
    exit_code_of,
    print_json,
    print_result,
    result_as_json,
)
from tidemill_producer.commands.progress import progress


def submit(
    *,
    queue: QueueName,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT|-", help="The prompt; - reads it from standard input.")
    ] = None,
    redis_url: RedisUrl = DEFAULT_URL,
    file: Annotated[
        typer.FileBinaryRead | None,
        typer.Option("--file", "-f", metavar="PATH", help="Jobs as JSON lines; - reads standard input."),
    ] = None,
    job_id: Annotated[
        str | None, typer.Option("--id", help="The job's id; the same id is never run twice.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Refuse to be answered by any other model.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this string; may be given again.")
    ] = None,
    priority: Annotated[Priority | None, typer.Option(help="Served first to last.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenants share the workers fairly.")] = None,
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="After this the answer is worthless.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    system: Annotated[str | None, typer.Option(help="The chat's system message; implies --chat.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the results and print them.")] = False,
    timeout: Timeout = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it is generated.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put one job, or a file of jobs, in a queue and print the ids.

    With --wait the results are printed instead: the text of a single job, JSON lines for a file.

    A line of a file is a JSON object with the fields of a job: id, prompt or messages or
    prompt_token_ids, params, priority, tenant, deadline, metadata. Options given here fill what a
    line leaves out. A bad line is reported, the others are submitted, and the exit status is 2.
    """
    params = _given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    fields = _given(
        model=model, priority=priority, tenant=tenant, deadline=deadline, params=params, stream=stream or None
    )
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either a prompt (- for standard input) or --file", param_hint="PROMPT")
    if file is not None and (chat or system or stream or job_id):
        raise typer.BadParameter("--chat, --system, --stream and --id go with a single prompt, not a file")
    waits = wait or timeout is not None
    with BlockingClient(redis_url, queue=queue) as client:
        if file is not None:
            jobs = JobsFile(file.name, file, defaults=fields, report=complain)
            code = _submit_file(client, jobs, wait=waits, timeout=timeout, as_json=as_json)
        else:
            job = Job.parse(fields | _given(id=job_id) | _input(prompt or "", chat=chat, system=system))
            code = _submit_one(client, job, wait=waits, timeout=timeout, as_json=as_json)
    raise typer.Exit(code)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, [], {})}


def _input(prompt: str, *, chat: bool, system: str | None) -> dict[str, Any]:
    text = _standard_input() if prompt == "-" else prompt
    if not chat and system is None:
        return {"prompt": text}
    before = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*before, {"role": "user", "content": text}]}


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidJob(f"prompt: not UTF-8 (byte {error.start + 1})", field="prompt") from error


def _submit_one(
    client: BlockingClient, job: Job, *, wait: bool, timeout: float | None, as_json: bool
) -> ExitCode:
    job_id = client.submit(job)
    if job.stream:
        return _print_stream(client, job_id, timeout=timeout, as_json=as_json)
    if wait:
        return print_result(client.result(job_id, timeout=timeout), as_json=as_json)
    _print_id(client, job_id, as_json=as_json)
    return ExitCode.OK


def _print_stream(client: BlockingClient, job_id: JobId, *, timeout: float | None, as_json: bool) -> ExitCode:
    """With `as_json` the deltas, one a line, and then the result."""
    for delta in client.stream(job_id, timeout=timeout):
        if as_json:
            print_json(delta.model_dump(mode="json"))
        else:
            print(delta.text, end="", flush=True)
    result = client.result(job_id)
    if as_json:
        return print_result(result, as_json=True)
    print(flush=True)
    code = exit_code_of(result)
    if code is not ExitCode.OK:
        print_result(result, as_json=False)
    return code


def _submit_file(
    client: BlockingClient, jobs: JobsFile, *, wait: bool, timeout: float | None, as_json: bool
) -> ExitCode:
    code = ExitCode.OK
    if wait:
        with progress("answered") as advance:
            for result in client.as_completed(_submitted(client, jobs), timeout=timeout):
                print_json(result_as_json(result))
                advance()
                code = max(code, exit_code_of(result))
    else:
        with progress("submitted") as advance:
            for job_id in _submitted(client, jobs):
                _print_id(client, job_id, as_json=as_json)
                advance()
    return jobs.exit_code or code


def _submitted(client: BlockingClient, jobs: JobsFile) -> Iterator[JobId]:
    for job_id in client.submit_many(jobs, on_error=jobs.refused):
        jobs.accepted(job_id)
        yield job_id


def _print_id(client: BlockingClient, job_id: JobId, *, as_json: bool) -> None:
    if as_json:
        print_json({"id": job_id, "queue": client.queue})
    else:
        print(job_id)
