"""`tidemill submit`: one job from the command line, or many from a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from tidemill.blocking import BlockingClient
from tidemill.client import DEFAULT_URL
from tidemill.errors import InvalidJob, QueueUnavailable
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Delta, Job, JobId, Priority
from tidemill_producer.commands import generation_options as options
from tidemill_producer.commands.jobs_file import JobsFile
from tidemill_producer.commands.options import (
    AsJson,
    QueueName,
    RedisUrl,
    Timeout,
    WaitForRoom,
    complain,
    exit_code_of,
    headline,
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
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    stop: options.Stop = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    n: options.N = None,
    param: options.Params = None,
    json_schema: options.JsonSchema = None,
    json_object: options.JsonObject = False,
    regex: options.Regex = None,
    choice: options.Choices = None,
    grammar: options.Grammar = None,
    logprobs: options.Logprobs = None,
    echo: options.Echo = False,
    priority: Annotated[Priority | None, typer.Option(help="Served first to last.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenants share the workers fairly.")] = None,
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="After this the answer is worthless.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    system: Annotated[str | None, typer.Option(help="The chat's system message; implies --chat.")] = None,
    wait_for_room: WaitForRoom = 0.0,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the results and print them.")] = False,
    timeout: Timeout = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it is generated.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put one job, or a file of jobs, in a queue and print the ids.

    With --wait the results are printed instead: the text of a single job, JSON lines for a file. Texts
    of several generations (--n) come under a line each, such as `--- 1 of 3`.

    A line of a file is a JSON object with the fields of a job: id, prompt or messages or
    prompt_token_ids, params, priority, tenant, deadline, metadata. Options given here fill what a
    line leaves out. A bad line is reported, the others are submitted, and the exit status is 2.
    """
    params = options.other_params(param or ()) | _given(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        n=n,
        structured_outputs=options.structured_outputs(
            json_schema=json_schema, json_object=json_object, regex=regex, choices=choice, grammar=grammar
        ),
        logprobs=logprobs,
        echo=echo or None,
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
        client.ping()  # who cannot be reached now is not waited for
        if file is not None:
            jobs = JobsFile(file.name, file, defaults=fields, report=complain)
            ids = _submitted(client, jobs, wait_for_room=wait_for_room)
            code = _submit_file(client, jobs, ids, wait=waits, timeout=timeout, as_json=as_json)
        else:
            job = Job.parse(fields | _given(id=job_id) | _input(prompt or "", chat=chat, system=system))
            client.submit(job, wait_for_room=wait_for_room)
            code = _answer_one(client, job, wait=waits, timeout=timeout, as_json=as_json)
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


def _answer_one(
    client: BlockingClient, job: Job, *, wait: bool, timeout: float | None, as_json: bool
) -> ExitCode:
    if job.stream:
        return _print_stream(client, job.id, n=job.params.n, timeout=timeout, as_json=as_json)
    if wait:
        return print_result(client.result(job.id, timeout=timeout), as_json=as_json)
    _print_id(client, job.id, as_json=as_json)
    return ExitCode.OK


def _print_stream(
    client: BlockingClient, job_id: JobId, *, n: int, timeout: float | None, as_json: bool
) -> ExitCode:
    """With `as_json` the deltas, one a line, and then the result."""
    deltas = client.stream(job_id, timeout=timeout)
    if as_json:
        for delta in deltas:
            print_json(delta.model_dump(mode="json"))
        return print_result(client.result(job_id), as_json=True)
    _print_texts(deltas, n)
    result = client.result(job_id)
    code = exit_code_of(result)
    if code is not ExitCode.OK:
        print_result(result, as_json=False)
    return code


def _print_texts(deltas: Iterable[Delta], n: int) -> None:
    """The first generation as it comes; the others, which come at the same time, after it."""
    others = [""] * n
    if n > 1:
        print(headline(0, n), flush=True)
    printed = False
    for delta in deltas:
        if delta.restart:
            others = [""] * n
            if printed:
                print(flush=True)
                complain("begun anew by another worker; what was printed so far is void")
        if delta.choice == 0:
            print(delta.text, end="", flush=True)
            printed = True
        else:
            others[delta.choice] += delta.text
    print(flush=True)
    for index in range(1, n):
        print(headline(index, n), others[index], sep="\n", flush=True)


def _submit_file(
    client: BlockingClient,
    jobs: JobsFile,
    ids: Iterator[JobId],
    *,
    wait: bool,
    timeout: float | None,
    as_json: bool,
) -> ExitCode:
    code = ExitCode.OK
    if wait:
        with progress("answered") as advance:
            for result in client.as_completed(ids, timeout=timeout):
                print_json(result_as_json(result))
                advance()
                code = max(code, exit_code_of(result))
    else:
        with progress("submitted") as advance:
            for job_id in ids:
                _print_id(client, job_id, as_json=as_json)
                advance()
    return jobs.exit_code or code


def _submitted(client: BlockingClient, jobs: JobsFile, *, wait_for_room: float) -> Iterator[JobId]:
    """Where it ends before the end of the file, it says so, and where to go on."""
    try:
        for job_id in client.submit_many(jobs, on_error=jobs.refused, wait_for_room=wait_for_room):
            jobs.accepted(job_id)
            yield job_id
    except (QueueUnavailable, GeneratorExit):  # or who waits for the answers has given up
        jobs.say_where_to_go_on()
        raise
    jobs.say_where_to_go_on()


def _print_id(client: BlockingClient, job_id: JobId, *, as_json: bool) -> None:
    if as_json:
        print_json({"id": job_id, "queue": client.queue})
    else:
        print(job_id)
