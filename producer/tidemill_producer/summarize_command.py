"""`tidemill summarize`: documents in, summaries out, each as soon as it is done."""

from __future__ import annotations

import asyncio
import io
import math
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from tidemill.client import DEFAULT_URL, Client
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Priority
from tidemill_producer.commands.options import AsJson, QueueName, RedisUrl, Timeout, complain
from tidemill_producer.documents import STDIN, find_documents, read_documents
from tidemill_producer.report import Report
from tidemill_producer.summarize import Summarizer, await_card
from tidemill_producer.summary import INSTRUCTION, SYSTEM, SummaryOptions

INTERRUPTED = 130
TO_BE_CONTINUED = "submitted jobs stay in the queue; run the same command again to continue"


def summarize(
    *,
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Text or Markdown files, folders of them, - for stdin."),
    ],
    queue: QueueName,
    redis_url: RedisUrl = DEFAULT_URL,
    max_tokens: Annotated[int, typer.Option(help="Length of a summary, in tokens.")] = 128,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a document per job; by default what suits the model.")
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="What the model is told to do with each part, and with the summaries.")
    ] = None,
    markup: Annotated[
        bool, typer.Option("--markup", help="Show the model markup, links and code too, not the prose only.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each summary to a file in this folder.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenants share the workers fairly.")] = "default",
    priority: Annotated[Priority, typer.Option(help="Served first to last.")] = Priority.NORMAL,
    wait: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Wait this long for a worker to appear.")
    ] = 60.0,
    wait_for_room: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Wait this long for room in a full queue; else without end.",
        ),
    ] = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Summarize documents of any length, and print each summary as soon as it is done.

    Long documents are split at sentence ends, the parts are summarized, and then their summaries.
    Running the same command again continues an interrupted run: nothing is computed twice.
    """
    _check_paths(paths)
    options = SummaryOptions(
        max_tokens=max_tokens,
        chunk_tokens=chunk_tokens,
        system=instruction or SYSTEM,
        instruction=instruction or INSTRUCTION,
        markup=markup,
        tenant=tenant,
        priority=priority,
    )
    # Read before the event loop runs, which could not be interrupted while it waits for standard input.
    stdin = io.BytesIO(sys.stdin.buffer.read() if STDIN in paths else b"")
    report = Report(out, as_json=as_json)
    run = _run(
        redis_url,
        queue,
        options=options,
        paths=paths,
        stdin=stdin,
        report=report,
        wait=wait,
        wait_for_room=math.inf if wait_for_room is None else wait_for_room,
        timeout=timeout,
    )
    try:
        asyncio.run(run)
    except KeyboardInterrupt:
        complain(f"interrupted; {TO_BE_CONTINUED}")
        raise typer.Exit(INTERRUPTED) from None
    except TimeoutError:
        raise TimeoutError(f"not done within {timeout:g} s; {TO_BE_CONTINUED}") from None
    report.conclude()
    raise typer.Exit(ExitCode.FAILED if report.num_failed else ExitCode.OK)


async def _run(
    redis_url: str,
    queue: str,
    *,
    options: SummaryOptions,
    paths: Sequence[str],
    stdin: BinaryIO,
    report: Report,
    wait: float,
    wait_for_room: float,
    timeout: float | None,
) -> None:
    async with Client(redis_url, queue=queue) as client, asyncio.timeout(timeout):
        await client.ping()
        card = await await_card(client, timeout=wait, on_wait=complain)
        summarizer = Summarizer(
            client, card, options, wait_for_room=wait_for_room, on_progress=report.progressed
        )
        num_documents = sum(1 for _ in find_documents(paths, exclude=report.folder))
        documents = read_documents(find_documents(paths, exclude=report.folder), stdin=stdin)
        with report.running(num_documents):
            async with aclosing(summarizer.summarize_all(documents)) as outcomes:
                async for outcome in outcomes:
                    report.tell(outcome)


def _check_paths(paths: Sequence[str]) -> None:
    """A misspelt path is refused before anything is submitted."""
    for path in paths:
        if path != STDIN and not os.path.exists(path):
            raise typer.BadParameter(f"there is no {path}", param_hint="PATH")
    if paths.count(STDIN) > 1:
        raise typer.BadParameter("standard input can be read once only", param_hint="PATH")
