"""`tidemill dead list`, `show`, `requeue` and `purge`: what becomes of jobs that were given up."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import datetime
from itertools import chain, islice
from typing import Annotated, Any

import typer
from rich.table import Column

from tidemill.blocking import BlockingClient
from tidemill.client import DEFAULT_URL
from tidemill.errors import InvalidJob, JobUnknown
from tidemill.jobs import Job, Result
from tidemill.moves import DeadLetter
from tidemill.submission import batched
from tidemill_producer.commands.dead_letters import ChosenLetters
from tidemill_producer.commands.options import (
    AsJson,
    QueueName,
    RedisUrl,
    complain,
    print_fields,
    print_json,
    result_as_json,
)
from tidemill_producer.commands.table import cell, make_console, make_table, one_line

PROMPT_BEGINNING = 60
"""Characters of a prompt that the list shows."""

PURGED_AT_ONCE = 1000

LetterId = Annotated[str, typer.Argument(metavar="ID", help="Of the job, or of its dead letter.")]
LetterIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Of jobs, or of their dead letters.")
]
All = Annotated[bool, typer.Option("--all", help="All that are there now.")]


def list_letters(
    *,
    queue: QueueName,
    redis_url: RedisUrl = DEFAULT_URL,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Show N at most; 0 shows all.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List the jobs that were given up because all their attempts lost their workers, oldest first."""
    with BlockingClient(redis_url, queue=queue) as client, closing(client.dead_letters()) as letters:
        shown = map(_summary, islice(letters, limit or None))
        if as_json:
            for summary in shown:
                print_json(summary)
        elif (first := next(shown, None)) is not None:
            _print_table(chain([first], shown))
        else:
            complain(f"there are no dead letters in queue {queue}")
        if limit and next(letters, None) is not None:
            complain(f"there are more than {limit}; --limit 0 shows all")


def show(
    letter_id: LetterId, queue: QueueName, redis_url: RedisUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Show all that is known of a job that was given up: the job, and its error result.

    A result expires sooner than a dead letter does; then it is left out.
    """
    with BlockingClient(redis_url, queue=queue) as client:
        letter = client.dead_letter(letter_id)
        result = _result(client, letter)
    known = _known(letter)
    if as_json:
        print_json(known | {"result": result and result_as_json(result)})
        return
    error = result.error if result else None
    shown = known | {
        "buried_ms": None,
        "buried": _when(letter.entry_id),
        "job": known["job"] and json.dumps(known["job"], ensure_ascii=False),
        "error": error and f"{error.code}: {error.message}",
    }
    print_fields({name: one_line(str(value)) for name, value in shown.items() if value is not None})


def requeue(
    *,
    letter_ids: LetterIds = None,
    queue: QueueName,
    redis_url: RedisUrl = DEFAULT_URL,
    everything: All = False,
    reply_to: Annotated[
        str | None, typer.Option(metavar="NAME", help="Result stream for the answers of jobs that name none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit jobs that were given up again, under new ids; prints the old and the new id of each.

    May be repeated: what was requeued is no dead letter any more, and where that was interrupted the
    new id is the same again.
    """
    _check_choice(letter_ids, everything=everything)
    with BlockingClient(redis_url, queue=queue, results=reply_to) as client:
        letters = ChosenLetters(client, letter_ids or None)
        for letter in letters:
            try:
                new_id = client.requeue(letter)
            except InvalidJob as error:
                letters.refuse(error, about=f"job {letter.job_id}: ")
                continue
            if as_json:
                print_json({"requeued_from": letter.job_id, "id": new_id, "queue": queue})
            else:
                print(letter.job_id, new_id, flush=True)
    raise typer.Exit(letters.exit_code)


def purge(
    *,
    letter_ids: LetterIds = None,
    queue: QueueName,
    redis_url: RedisUrl = DEFAULT_URL,
    everything: All = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget jobs that were given up, for good; prints how many. Their error results stay."""
    _check_choice(letter_ids, everything=everything)
    with BlockingClient(redis_url, queue=queue) as client:
        letters = ChosenLetters(client, letter_ids or None)
        entries = list(dict.fromkeys(letter.entry_id for letter in letters))
        if entries and not yes:
            count = "1 dead letter" if len(entries) == 1 else f"{len(entries)} dead letters"
            if not _confirmed(f"Forget {count} of queue {queue} for good?"):
                complain("nothing was purged")
                raise typer.Exit(letters.exit_code)
        num_purged = sum(client.purge_dead_letters(chunk) for chunk in batched(entries, PURGED_AT_ONCE))
    if as_json:
        print_json({"queue": queue, "purged": num_purged})
    else:
        print(num_purged)
    raise typer.Exit(letters.exit_code)


def _check_choice(letter_ids: list[str] | None, *, everything: bool) -> None:
    if bool(letter_ids) == everything:
        raise typer.BadParameter("give either the ids of some, or --all", param_hint="ID")


def _confirmed(question: str) -> bool:
    """Whether the answer is yes; unlike typer's own, this leaves standard output alone.

    Raises:
        typer.Abort: there is nobody to answer.
    """
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        raise typer.Abort
    return answer.strip().lower() in {"y", "yes"}


def _job(letter: DeadLetter) -> Job | None:
    try:
        return Job.from_wire(letter.payload)
    except InvalidJob:
        return None


def _result(client: BlockingClient, letter: DeadLetter) -> Result | None:
    try:
        return client.result(letter.job_id, timeout=0.0)
    except (JobUnknown, TimeoutError):
        return None


def _summary(letter: DeadLetter) -> dict[str, Any]:
    """What the list shows; of a payload that is no job, its beginning."""
    job = _job(letter)
    return _origin(letter) | {
        "tenant": job.tenant if job else None,
        "prompt": one_line(_input(job) if job else _text(letter), PROMPT_BEGINNING),
    }


def _known(letter: DeadLetter) -> dict[str, Any]:
    """All that the letter has: the job as it was submitted, or the payload if that is no job."""
    job = _job(letter)
    return _origin(letter) | {
        "job": job and json.loads(job.to_wire()),
        "payload": None if job else _text(letter),
    }


def _origin(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.job_id,
        "entry_id": letter.entry_id,
        "buried_ms": _milliseconds(letter.entry_id),
        "attempts": letter.failures,
        "worker": letter.worker,
    }


def _milliseconds(entry_id: str) -> int:
    """When an entry was made, by Redis's clock."""
    return int(entry_id.partition("-")[0])


def _when(entry_id: str) -> str:
    """The same for people, who live by their own clock."""
    return datetime.fromtimestamp(_milliseconds(entry_id) / 1000).strftime("%Y-%m-%d %H:%M")


def _text(letter: DeadLetter) -> str:
    return letter.payload.decode(errors="replace")


def _input(job: Job) -> str:
    if job.messages:
        return job.messages[-1].content
    return job.prompt if job.prompt is not None else f"{len(job.prompt_token_ids or ())} tokens"


def _print_table(summaries: Iterable[Mapping[str, Any]]) -> None:
    table = make_table(
        Column("ID", overflow="fold"),
        Column("WHEN", min_width=16, no_wrap=True),
        Column("ATTEMPTS", justify="right", min_width=8, no_wrap=True),
        *(Column(name, overflow="fold") for name in ("WORKER", "TENANT", "PROMPT")),
    )
    for letter in summaries:
        names = (cell(letter[name] or "-") for name in ("worker", "tenant", "prompt"))
        table.add_row(cell(letter["id"]), _when(letter["entry_id"]), str(letter["attempts"]), *names)
    make_console().print(table)
