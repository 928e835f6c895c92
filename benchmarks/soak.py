"""Thousands of jobs while workers are killed, frozen and stopped, the server restarted and wires cut.

    python benchmarks/soak.py [--minutes 10] [--workers 3] [--kills 150] [--restarts 8] [--seed 0]
                              [--server valkey|redis] [--quick] [--json PATH]

Real worker processes serve a tiny model from a real server. Then every answer is compared with that of
an undisturbed run. Exit status 1, and a folder that is kept, if a job was lost, given up, answered twice or
wrongly, if somebody who asked for one was not told, if anything is left in the queue, or if a worker ended
otherwise than it was told to or logged an error.

The server syncs its file at every write, which is what makes "nothing acknowledged may be lost" a fair
demand: with `everysec`, a server whose disk is slow holds writes back in its own memory, and a kill takes
them with it although they were acknowledged.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import benchmark_parser, report
from rich.console import Console
from servers import KINDS, OwnServer, running
from soak_fleet import Fleet
from soak_load import Load, make_templates
from soak_torment import Blow, Tormentor, plan
from soak_verdict import Evidence, Verdict, events, judge
from tiny_model import write_tiny_model
from wire import Wire, wire_to
from worker_logs import complaints
from worker_processes import WorkerProcesses

from tidemill import Job
from tidemill.client import Client, ClientSettings
from tidemill.connection import connect
from tidemill.jobs import JobId, Result
from tidemill.moves import QueueSettings
from tidemill.queue import Queue

QUEUE, UNDISTURBED, ANSWERS = "soak", "undisturbed", "soak"
LEASE = 2.0
"""Seconds: short, so that whatever depends on it happens often."""
MAX_ATTEMPTS = 8
"""More than in production: here a worker lives for seconds, no job is to blame for its end, and none may be
given up. The pauses before so many attempts, a minute in all, are well within `PATIENCE`."""
SETTINGS = QueueSettings(lease=LEASE, max_attempts=MAX_ATTEMPTS)
FLAGS: dict[str, Any] = {
    "lease": LEASE,
    "max_attempts": MAX_ATTEMPTS,
    "renewal": LEASE / 4,
    "stream_interval": 0.1,
    "grace_period": 1.0,
    "redis_wait": 60.0,
    "device": "cpu",
    "max_num_seqs": 16,
    "max_model_len": 1024,
    "kv_cache_memory": 0.002,  # GiB: some 4,000 tokens, so that running jobs preempt each other
    "swap_space": 0.004,
    "log_level": "debug",
}
TEMPLATES = 160
AHEAD = 60
"""Unfinished jobs for each worker: what it holds, and as many again."""
PATIENCE = 120.0
"""Seconds that clients put up with an absent server, and in which the last answers must have reached all."""
PROGRESS = 5.0
SHOWN = 10
"""Jobs that are explained, of those that something is wrong with, and odd things about workers."""


@dataclass
class Soak:
    """One soak, from the first job to the verdict."""

    folder: Path
    minutes: float
    workers: int
    kills: int
    restarts: int
    seed: int
    console: Console = field(default_factory=Console)

    async def run(self, server: OwnServer, processes: WorkerProcesses) -> tuple[Verdict, dict[str, float]]:
        """Everything; returns what became of the jobs, and the figures."""
        templates = make_templates(TEMPLATES, seed=self.seed)
        self._tell(f"{len(templates)} jobs undisturbed, to compare with; files are in {self.folder}")
        references = await undisturbed(server, processes, templates)
        async with AsyncExitStack() as stack:
            wires = [await stack.enter_async_context(wire_to(server.port)) for _ in range(self.workers + 1)]
            fleet = Fleet(processes, wires[:-1], queue=QUEUE, patience=5 * LEASE)
            tormentor = Tormentor(fleet, server, wires)
            load = await stack.enter_async_context(self._load(wires[-1], templates))
            fleet.start()
            await self._torment(load, fleet, tormentor)
            odd = await fleet.until_idle() + await fleet.stop()
        verdict = self._judge(server, load, references)
        verdict.odd = odd + complaints(self._logs)
        figures = self._figures(verdict, load, tormentor)
        with server.client() as client:
            figures["resumed_tokens"] = Evidence(client, QUEUE).resumed_tokens(load.sent)
        return verdict, figures

    @asynccontextmanager
    async def _load(self, wire: Wire, templates: Sequence[Job]) -> AsyncIterator[Load]:
        settings = ClientSettings(queue=SETTINGS, patience=PATIENCE)
        async with (
            Client(wire.url, queue=QUEUE, results=ANSWERS, settings=settings) as client,
            connect(wire.url) as redis,
        ):
            queue = Queue(redis, QUEUE, SETTINGS)
            dice = random.Random(self.seed)
            yield Load(client, queue, templates, dice, ahead=AHEAD * self.workers)
            await queue.aclose()

    async def _torment(self, load: Load, fleet: Fleet, tormentor: Tormentor) -> None:
        """Until all blows are struck, and then until all is answered or there is no hope of it."""
        blows = plan(
            seconds=60 * self.minutes,
            kills=self.kills,
            restarts=self.restarts,
            workers=self.workers,
            lease=LEASE,
            seed=self.seed,
        )
        end = time.monotonic() + 60 * self.minutes
        async with asyncio.TaskGroup() as parts:  # whichever fails ends the soak at once
            producing = parts.create_task(load.run())
            background = [
                parts.create_task(part)
                for part in (load.read(), fleet.supervise(), self._progress(load, tormentor))
            ]
            await tormentor.run(blows)
            await asyncio.sleep(max(0.0, end - time.monotonic()))
            load.stop()
            with suppress(TimeoutError):  # what has not ended by then is in the evidence
                async with asyncio.timeout(PATIENCE):
                    await producing
                    await load.until_answered()
            for task in background:
                task.cancel()

    async def _progress(self, load: Load, tormentor: Tormentor) -> None:
        start = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS)
            struck = ", ".join(f"{count} {blow}" for blow, count in sorted(tormentor.done.items()))
            self._tell(
                f"{time.monotonic() - start:4.0f} s: {load.num_accepted} submitted,"
                f" {load.num_unanswered} unanswered; {struck}"
            )

    def _tell(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @property
    def _logs(self) -> list[Path]:
        return sorted(self.folder.glob("worker-*.log"))

    def _judge(self, server: OwnServer, load: Load, references: Sequence[Result]) -> Verdict:
        with server.client() as client:
            evidence = Evidence(client, QUEUE)
            verdict = judge(load.sent, evidence.answers(ANSWERS), references, load.seen)
            verdict.left += evidence.left_over()
            for job_id in verdict.suspects[:SHOWN]:
                self._tell(f"job {job_id}: {verdict.reason(job_id)}")
                for line in evidence_of(job_id, load, evidence, self._logs):
                    self._tell(f"  {line}")
        return verdict

    def _figures(self, verdict: Verdict, load: Load, tormentor: Tormentor) -> dict[str, float]:
        done = tormentor.done
        return {
            "jobs": load.num_accepted,
            "tokens": verdict.num_tokens,
            "kills": done[Blow.KILL],
            "freezes": done[Blow.FREEZE],
            "terminations": done[Blow.TERMINATE],
            "server_restarts": done[Blow.SERVER_KILL] + done[Blow.SERVER_STOP],
            "script_flushes": done[Blow.FLUSH_SCRIPTS],
            "cuts": done[Blow.CUT],
            "lost": len(verdict.lost),
            "duplicated": len(verdict.duplicated),
            "wrong": len(verdict.wrong),
            "left": len(verdict.left),
            "buried": len(verdict.buried),
            "odd": len(verdict.odd),
            **{str(status): count for status, count in sorted(verdict.statuses.items())},
        }


def evidence_of(job_id: JobId, load: Load, evidence: Evidence, logs: Sequence[Path]) -> Iterator[str]:
    """All there is to know about one job: what was asked, its hash, and where the workers name it."""
    sent = load.sent.get(job_id)
    if sent is not None:
        yield sent.job.to_wire()
        yield f"accepted: {sent.is_accepted}, to be cancelled: {sent.is_cancelled}, streamed: {sent.streamed}"
    yield f"{evidence.job(job_id)}"
    yield from events(job_id, logs)


async def undisturbed(
    server: OwnServer, processes: WorkerProcesses, templates: Sequence[Job]
) -> list[Result]:
    """The answers of one worker that nothing happens to."""
    worker = processes.start(queue=UNDISTURBED, redis_url=server.url)
    async with Client(server.url, queue=UNDISTURBED, settings=ClientSettings(queue=SETTINGS)) as client:
        job_ids = [job_id async for job_id in client.submit_many(templates)]
        by_id = {result.id: result async for result in client.as_completed(job_ids, timeout=PATIENCE)}
    worker.terminate()
    await asyncio.to_thread(worker.wait)
    return [by_id[job_id] for job_id in job_ids]


def main() -> None:
    parser = benchmark_parser(__doc__, quick="one minute, 12 kills and 2 restarts")
    parser.add_argument("--minutes", type=float, default=10.0, help="default: 10")
    parser.add_argument("--workers", type=int, default=3, help="default: 3")
    parser.add_argument("--kills", type=int, default=150, help="of workers, by SIGKILL; default: 150")
    parser.add_argument("--restarts", type=int, default=8, help="of the server; default: 8")
    parser.add_argument("--server", choices=KINDS, default="valkey", help="default: valkey")
    parser.add_argument("--seed", type=int, default=0, help="of jobs and torment; default: 0")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.minutes, arguments.kills, arguments.restarts = 1.0, 12, 2

    settings = {
        name: getattr(arguments, name) for name in ("minutes", "workers", "kills", "restarts", "seed")
    }
    folder = Path(tempfile.mkdtemp(prefix="tidemill-soak-"))
    model = write_tiny_model(folder / "model")
    with (
        running(arguments.server, folder, appendfsync="always") as server,
        WorkerProcesses(
            folder, model=model, served_model_name="tiny", cache_dir=folder, **FLAGS
        ) as processes,
    ):
        verdict, figures = asyncio.run(Soak(folder, **settings).run(server, processes))
    for left in verdict.left:
        print(f"left: {left}")
    for odd in verdict.odd[:SHOWN]:
        print(f"odd: {odd}")
    report(figures, settings={**settings, "server": arguments.server}, path=arguments.json)
    if not verdict.is_clean:
        raise SystemExit(f"not clean; everything about it is in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
