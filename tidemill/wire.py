"""Between the values of `moves` and what Redis and the scripts send."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from typing import Any

from tidemill.errors import ErrorCode, InvalidJob, JobConflict, QueueFull
from tidemill.jobs import Delta, ErrorInfo, FinishReason, Job, JobId, Priority, Result, Status
from tidemill.keys import ENDED, RESTARTED, EntryField, JobField, split_lane
from tidemill.moves import (
    MAX_REPLIES,
    Claimed,
    DeadLetter,
    DeltaPage,
    JobState,
    JobView,
    QueueDepth,
    QueueSettings,
    Renewal,
    SubmitOutcome,
    Submitted,
)
from tidemill.registry import WorkerReport, WorkerView
from tidemill.service import UNITS_PER_GENERATED_TOKEN, UNITS_PER_PROMPT_TOKEN

Fields = Mapping[bytes, bytes]
Entries = list[tuple[str, Fields]]

VIEW_FIELDS = (
    JobField.STATE,
    JobField.PRIORITY,
    JobField.TENANT,
    JobField.ATTEMPT,
    JobField.FAILURES,
    JobField.WORKER,
    JobField.CANCEL,
    JobField.TOKENS,
    JobField.SUBMITTED,
    JobField.CLAIMED,
    JobField.DEADLINE,
    JobField.FINISHED,
    JobField.STATUS,
    JobField.REPLIES,
)

MAX_DEADLINE = 1e10
"""Seconds; far beyond anyone's patience, and exact in milliseconds as a score of Redis."""

SUBMISSIONS_PER_SCRIPT = 32
"""Starting a script costs more than a submission does: measured, 40 to 50 us of the server's time for a
job by itself, 18 to 22 for each of 32, 17 to 20 for each of 128. More would gain little, hold others up for
longer than a millisecond, and overshoot the server's memory limit by more, which is looked at between
scripts only."""

RENEWALS_PER_CALL = 100
"""Keeps one call of renew at 2 ms of the server's time: measured, 9 us for a lease alone and 20 with a
delta of ten tokens. 500 leases go in five calls of one round trip. Beside such a worker the slowest in
a hundred of another client's commands waited 9 to 10 ms, and 15 to 17 if all 500 were one call."""
RENEWED_BYTES_PER_CALL = 1 << 20
"""Of deltas, beyond what the last job of a call brings: with log-probabilities, jobs send some hundred
times as much as without."""


def milliseconds(seconds: float) -> int:
    """Redis's unit; never 0."""
    return max(1, round(seconds * 1000))


TIMES = (
    "lease", "result_ttl", "dead_letter_ttl", "stream_ttl", "worker_ttl", "backoff", "max_backoff", "ageing",
)  # fmt: skip
LIMITS = ("max_attempts", "max_depth", "max_tenant_depth", "memory_overdraft")


def script_settings(settings: QueueSettings) -> dict[str, Any]:
    """What every script is given: times in milliseconds, limits where set, what there is and costs."""
    values = asdict(settings)
    return {
        **{name: milliseconds(values[name]) for name in TIMES},
        **{name: values[name] for name in LIMITS if values[name] is not None},
        "priorities": [priority.value for priority in Priority],
        "max_replies": MAX_REPLIES,
        "prompt_token": UNITS_PER_PROMPT_TOKEN,
        "generated_token": UNITS_PER_GENERATED_TOKEN,
    }


def submission_calls(version: int, jobs: Sequence[tuple[Job, bytes]], reply_to: str) -> list[list[Any]]:
    """Arguments of submit for jobs and their payloads."""
    parts = (jobs[i : i + SUBMISSIONS_PER_SCRIPT] for i in range(0, len(jobs), SUBMISSIONS_PER_SCRIPT))
    return [[version, *chain.from_iterable(_submission(*pair, reply_to) for pair in part)] for part in parts]


def _submission(job: Job, payload: bytes, reply_to: str) -> list[Any]:
    seed = job.params.seed if job.params.seed is not None else secrets.randbits(63)
    deadline = "" if job.deadline is None else milliseconds(min(job.deadline, MAX_DEADLINE))
    return [
        job.id, job.digest(), payload, job.priority.value, job.tenant, seed, deadline,
        job.reply_to or reply_to, int(job.stream),
    ]  # fmt: skip


def too_large(job: Job, size: int, settings: QueueSettings) -> InvalidJob:
    """Why a job whose JSON has `size` bytes is not sent."""
    limit = settings.max_payload
    return InvalidJob(
        f"job {job.id}: its JSON has {size} bytes, at most {limit} are allowed", field="payload", limit=limit
    )


def submit_outcome(reply: str, job: Job, queue: str, settings: QueueSettings) -> SubmitOutcome:
    """Read one word of the reply of `submit.lua`."""
    match reply:
        case "conflict":
            return JobConflict(f"job {job.id} was submitted before with other content")
        case "too_many_replies":
            return InvalidJob(
                f"job {job.id}: reply_to: its result already goes to {MAX_REPLIES} names, which is the most",
                field="reply_to",
                limit=MAX_REPLIES,
            )
        case "queue_full":
            limit = settings.max_depth
            return QueueFull(f"queue {queue} holds {limit} unfinished jobs", limit=limit)
        case "tenant_full":
            limit = settings.max_tenant_depth or 0
            return QueueFull(f"tenant {job.tenant} has {limit} unfinished jobs", limit=limit)
    return Submitted(reply)


def renewal_calls(worker: str, renewals: Sequence[Renewal]) -> list[list[Any]]:
    """Arguments of renew and release: per job id, attempt, prompt tokens, number of deltas, and these."""
    calls: list[list[Any]] = []
    num_jobs = num_bytes = 0
    for renewal in renewals:
        if not calls or num_jobs >= RENEWALS_PER_CALL or num_bytes >= RENEWED_BYTES_PER_CALL:
            calls.append([worker])
            num_jobs = num_bytes = 0
        calls[-1] += [renewal.job_id, renewal.attempt, renewal.prompt_tokens, len(renewal.deltas)]
        num_jobs += 1
        for delta in renewal.deltas:
            content = delta.to_wire()
            calls[-1] += [delta.index, len(delta.token_ids), content]
            num_bytes += len(content)
    return calls


def finish_call(worker: str, attempt: int, result: Result) -> list[Any]:
    """Arguments of finish. The prompt was served if the attempt began it, or any attempt got beyond it."""
    usage = result.usage
    succeeded, begun = result.status is Status.SUCCEEDED, result.timings.waiting is not None
    prompt_tokens = usage.prompt_tokens if succeeded or begun or usage.completion_tokens else 0
    return [
        worker, attempt, result.id, result.status.value, result.to_wire(),
        prompt_tokens, usage.completion_tokens,
    ]  # fmt: skip


def entries(reply: Any) -> Entries:
    """Flatten the reply of XREAD on one stream, in the shape of protocol 2."""
    return [(entry.decode(), fields) for _, found in reply or () for entry, fields in found]


def _text(fields: Fields, name: EntryField) -> str:
    return fields.get(name.encode(), b"").decode(errors="replace")


def _optional(value: bytes | None) -> int | None:
    return int(value) if value else None


def _checkpoint(items: Sequence[bytes]) -> tuple[Delta, ...]:
    try:
        deltas = tuple(Delta.from_wire(item) for item in items)
    except InvalidJob as error:
        raise ValueError(f"checkpoint: {error}") from error
    expected = 0
    for delta in deltas:
        if delta.index != expected:
            raise ValueError(f"checkpoint: goes on at token {delta.index}, expected {expected}")
        expected += len(delta.token_ids)
    return deltas


def holding(reply: Sequence[Any]) -> tuple[JobId, int]:
    """Read the part of such a reply that only the scripts write: job id and attempt."""
    return JobId(reply[0].decode()), int(reply[3])


def claimed(reply: Sequence[Any]) -> Claimed:
    """Read one reply of claim or reclaim; see `_leases.lua`.

    Raises:
        ValueError: somebody else has written to the job.
    """
    _, payload, seed, _, failures, submitted, at, deadline, stream, alone, deltas = reply
    job_id, attempt = holding(reply)
    return Claimed(
        job_id=job_id,
        payload=payload,
        seed=int(seed),
        attempt=attempt,
        failures=int(failures),
        submitted_ms=int(submitted),
        claimed_ms=int(at),
        deadline_ms=_optional(deadline),
        checkpoint=_checkpoint(deltas),
        stream=stream == b"1",
        alone=alone == b"1",
    )


def result(entry: Any, fields: Any) -> tuple[str, Result]:
    """Read an entry of a result stream; what is none becomes a failed result."""
    entry_id = entry if isinstance(entry, str) else entry.decode()
    try:
        return entry_id, Result.from_wire(fields.get(EntryField.RESULT.encode(), b""))
    except InvalidJob as error:
        job_id = JobId(_text(fields, EntryField.ID))
        info = ErrorInfo(code=ErrorCode.UNDECODABLE, message=f"not a result: {error}")
        failed = Result(id=job_id, status=Status.FAILED, finish_reason=FinishReason.ERROR, error=info)
        return entry_id, failed


def delta_page(page: Entries, cursor: str) -> DeltaPage:
    """Read the entries of a delta stream behind `cursor`, which tells whether a restart came just before."""
    deltas, restarted, ended = [], cursor.endswith(RESTARTED), False
    for entry, fields in page:
        if (content := fields.get(EntryField.DELTA.encode())) is not None:
            delta = Delta.from_wire(content)
            deltas.append(delta.model_copy(update={"restart": True}) if restarted else delta)
            restarted = False
        restarted |= entry.endswith(RESTARTED)
        ended |= entry.endswith(ENDED)
    return DeltaPage(tuple(deltas), page[-1][0] if page else cursor, ended, restarted)


def dead_letter(entry: str, fields: Fields) -> DeadLetter:
    """Read an entry of the dead-letter stream."""
    return DeadLetter(
        entry_id=entry,
        job_id=JobId(_text(fields, EntryField.ID)),
        payload=fields.get(EntryField.PAYLOAD.encode(), b""),
        failures=int(_text(fields, EntryField.FAILURES) or 0),
        worker=_text(fields, EntryField.WORKER) or None,
    )


def worker_views(reply: Sequence[Any]) -> list[WorkerView]:
    """Read the reply of `workers.lua`; what is no report, some foreign hand's, is no worker."""
    views = []
    for text, age in zip(reply[::2], reply[1::2], strict=True):
        with suppress(InvalidJob):
            views.append(WorkerView(WorkerReport.from_wire(text), age / 1000))
    return sorted(views, key=lambda view: view.report.name)


def _replies(text: str) -> dict[str, str | None]:
    pairs = (pair.split("=") for pair in text.split())
    return {name: entry or None for name, entry in pairs}


def job_view(job_id: JobId, values: Sequence[Any]) -> JobView | None:
    """Read the `VIEW_FIELDS` of a job's hash."""
    found = {name: value.decode() for name, value in zip(VIEW_FIELDS, values, strict=True) if value}
    if JobField.STATE not in found:
        return None

    def number(name: JobField) -> int | None:
        return int(found[name]) if name in found else None

    return JobView(
        job_id=job_id,
        state=JobState(found[JobField.STATE]),
        priority=Priority(found[JobField.PRIORITY]),
        tenant=found[JobField.TENANT],
        attempt=number(JobField.ATTEMPT) or 0,
        failures=number(JobField.FAILURES) or 0,
        worker=found.get(JobField.WORKER),
        cancel_requested=JobField.CANCEL in found,
        checkpointed_tokens=number(JobField.TOKENS) or 0,
        submitted_ms=number(JobField.SUBMITTED) or 0,
        claimed_ms=number(JobField.CLAIMED),
        deadline_ms=number(JobField.DEADLINE),
        finished_ms=number(JobField.FINISHED),
        status=Status(found[JobField.STATUS]) if JobField.STATUS in found else None,
        replies=_replies(found.get(JobField.REPLIES, "")),
    )


def queue_depth(reply: Sequence[Any]) -> QueueDepth:
    """Read the reply of `depth.lua`; lanes of different wire versions are summed."""
    running, delayed, dead, oldest, now, *lanes = reply
    by_tenant: dict[tuple[Priority, str], int] = {}
    for lane, waiting in zip(lanes[::2], lanes[1::2], strict=True):
        _, priority, tenant = split_lane(lane.decode())
        by_tenant[priority, tenant] = by_tenant.get((priority, tenant), 0) + waiting
    total = sum(by_tenant.values())
    return QueueDepth(
        total=total + delayed,
        waiting=total,
        running=running,
        delayed=delayed,
        by_tenant=by_tenant,
        dead_letters=dead,
        oldest_waiting=(int(now) - int(oldest)) / 1000 if oldest else None,
    )
