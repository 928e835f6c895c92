"""What became of the soak's jobs, by what is written in the server's streams."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from soak_load import Sent

from tidemill.errors import ErrorCode
from tidemill.jobs import Choice, JobId, Result, Status
from tidemill.keys import EntryField, JobField, Key, QueueKeys

PAGE = 500
HELD_BACK, BROKEN = 1, "\ufffd"
"""What may stand at the end of a text that was cut short, and not in the whole one: the first character
of a stop string of two, and half a character."""
CONFIGURATION = Key.WEIGHTS
"""The one key that is meant to stay."""


@dataclass
class Verdict:
    """Everything that is not as it was promised, and what there is to count besides."""

    lost: list[JobId] = field(default_factory=list)
    """Accepted, and without an answer."""
    duplicated: list[JobId] = field(default_factory=list)
    """With a second entry in the stream of answers; once for each further one."""
    wrong: dict[JobId, str] = field(default_factory=dict)
    """Answered otherwise than in the undisturbed run, or somebody who asked for it was let down; and how."""
    buried: list[JobId] = field(default_factory=list)
    """Given up after `max_attempts`, although no job is to blame."""
    left: list[str] = field(default_factory=list)
    """Keys without an expiry, and entries that are still pending."""
    odd: list[str] = field(default_factory=list)
    """Workers that hold something at the end, ended otherwise than they were told to, or log an error."""
    statuses: Counter[Status] = field(default_factory=Counter)
    num_tokens: int = 0
    """Of all answers together."""

    @property
    def is_clean(self) -> bool:
        return not (self.suspects or self.left or self.odd)

    @property
    def suspects(self) -> list[JobId]:
        """Jobs to look at."""
        return list(dict.fromkeys([*self.lost, *self.duplicated, *self.wrong, *self.buried]))

    def reason(self, job_id: JobId) -> str:
        """What is wrong with a suspect."""
        reasons = []
        if job_id in self.lost:
            reasons.append("lost")
        if job_id in self.duplicated:
            reasons.append(f"answered {1 + self.duplicated.count(job_id)} times")
        if job_id in self.buried:
            reasons.append("given up")
        if job_id in self.wrong:
            reasons.append(self.wrong[job_id])
        return "; ".join(reasons)


def judge(
    sent: Mapping[JobId, Sent],
    answers: Iterable[Result],
    references: Sequence[Result],
    read: Collection[JobId],
) -> Verdict:
    """Hold the answers against the jobs, and against the undisturbed answer to each template.

    Args:
        sent: all jobs that were submitted.
        answers: the entries of their stream of answers, from the first to the last.
        references: by template.
        read: jobs whose answers came to whoever reads that stream by cursor.
    """
    verdict = Verdict()
    faults = defaultdict(list, {job_id: [one.complaint] for job_id, one in sent.items() if one.complaint})
    answered: set[JobId] = set()
    for answer in answers:
        if answer.id not in sent:
            faults[answer.id].append("nobody submitted this job")
        elif answer.id in answered:
            verdict.duplicated.append(answer.id)
        else:
            answered.add(answer.id)
            _count(verdict, answer)
            one = sent[answer.id]
            faults[answer.id] += _faults(one, answer, references[one.template])
    for job_id in sorted(answered.difference(read)):
        faults[job_id].append("whoever reads the answers was not given this one")
    verdict.wrong = {job_id: "; ".join(found) for job_id, found in faults.items() if found}
    verdict.lost = [job_id for job_id, one in sent.items() if one.is_accepted and job_id not in answered]
    return verdict


def _count(verdict: Verdict, answer: Result) -> None:
    verdict.statuses[answer.status] += 1
    verdict.num_tokens += answer.usage.completion_tokens
    if _is_buried(answer):
        verdict.buried.append(answer.id)


def _faults(sent: Sent, answer: Result, reference: Result) -> Iterator[str]:
    if answer.metadata != sent.job.metadata:
        yield f"metadata {dict(answer.metadata)}"
    if sent.awaited is not None and sent.awaited != answer:
        yield "who waited for it alone was given another answer"
    if sent.streamed is not None and _differs(sent.streamed, answer):
        yield "its stream told another text than its answer"
    if _is_buried(answer) or (answer.status is Status.CANCELLED and sent.is_cancelled):
        yield from _departures(answer.choices, reference.choices)
    elif answer.status is not reference.status:
        yield f"{answer.status}, undisturbed {reference.status}"
    elif answer.error != reference.error:
        yield f"error {answer.error}, undisturbed {reference.error}"
    elif answer.choices != reference.choices:
        yield "its generations are not those of the undisturbed run"
    elif answer.usage.total_tokens != reference.usage.total_tokens:
        yield f"{answer.usage.total_tokens} tokens used, undisturbed {reference.usage.total_tokens}"


def _is_buried(answer: Result) -> bool:
    return answer.error is not None and answer.error.code is ErrorCode.ATTEMPTS_EXHAUSTED


def _differs(streamed: Mapping[int, str], answer: Result) -> bool:
    texts = {choice.index: choice.text for choice in answer.choices if choice.text}
    return {index: text for index, text in streamed.items() if text} != texts


def _departures(found: Sequence[Choice], undisturbed: Sequence[Choice]) -> Iterator[str]:
    """A job that was ended early has a beginning of what it would have had."""
    whole = {choice.index: choice for choice in undisturbed}
    for choice in found:
        length, full = len(choice.token_ids), whole[choice.index]
        certain = choice.text.rstrip(BROKEN)[:-HELD_BACK]
        if choice.token_ids != full.token_ids[:length] or not full.text.startswith(certain):
            yield f"generation {choice.index} does not begin as in the undisturbed run"


class Evidence:
    """What a queue's keys say when it should be empty."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self._client: Any = client  # its annotations are those of all protocols at once
        self._keys = QueueKeys(queue)

    def answers(self, name: str) -> Iterator[Result]:
        """All entries of a stream of answers, in their order.

        Raises:
            InvalidJob: one of them is none.
        """
        key, after = self._keys.results(name), "-"
        while page := self._client.xrange(key, after, "+", PAGE):
            for entry, fields in page:
                after = f"({entry.decode()}"
                yield Result.from_wire(fields[EntryField.RESULT.encode()])

    def left_over(self) -> list[str]:
        """Keys that would stay for ever, and entries that are pending."""
        keys = [key.decode() for key in self._client.scan_iter(f"{self._keys.prefix}*", count=PAGE)]
        kept = [key for key in keys if self._client.pttl(key) == -1]
        left = [f"{key} has no expiry" for key in kept if not key.endswith(f":{CONFIGURATION}")]
        for kind in (Key.JOBS, Key.RETURNED):
            left += [self._pending(key) for key in keys if key.startswith(f"{self._keys.prefix}{kind}")]
        return left

    def _pending(self, key: str) -> str:
        pending = sum(group["pending"] for group in self._client.xinfo_groups(key))
        return f"{key} has {self._client.xlen(key)} entries, {pending} of them pending"

    def resumed_tokens(self, job_ids: Iterable[JobId]) -> int:
        """Tokens of answers that whoever finished the job took from its checkpoint."""
        pipeline = self._client.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.hget(self._keys.job(job_id), JobField.BASE)
        return sum(int(base or 0) for base in pipeline.execute())

    def job(self, job_id: JobId) -> dict[str, str]:
        """A job's hash as it is now."""
        found = self._client.hgetall(self._keys.job(job_id))
        return {name.decode(): value.decode(errors="replace") for name, value in found.items()}


def events(job_id: JobId, logs: Iterable[Path]) -> list[str]:
    """Lines of the workers' logs that name a job, each with the log it is from."""
    return [
        f"{log.name}: {line}"
        for log in logs
        for line in log.read_text(errors="replace").splitlines()
        if job_id in line
    ]
