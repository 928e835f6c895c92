"""Jobs from a file of JSON lines; a bad line is reported and hinders no other one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tidemill.errors import InvalidJob, QueueFull, TidemillError
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Job, JobId


class JobsFile:
    """Walks the lines once; remembers which line each job came from until it was submitted.

    Once the queue is full it takes no further line.
    """

    def __init__(
        self,
        name: str,
        lines: Iterable[bytes],
        *,
        defaults: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        """`defaults` fill what a line leaves out; `report` gets "name:line: what is wrong"."""
        self._num_bad = 0
        self._num_read = 0
        self._is_at_end = False
        self._has_accepted = False
        self._without_room: list[int] = []
        self._name = name
        self._lines = lines
        self._defaults = defaults
        self._report = report
        self._lines_of: dict[JobId, list[int]] = {}
        """Those whose fate is not known yet."""
        self._drawn: set[JobId] = set()
        """Jobs among them whose id is no line's own: read again, they would be others."""
        self._last_drawn = 0
        """The last line with such an id that was accepted."""

    def __iter__(self) -> Iterator[Job]:
        for number, line in enumerate(self._lines, start=1):
            self._num_read = number
            if self._without_room:
                self._report(f"{self._name}:{number}: not submitted, nor is any line after it")
                return
            if not line.strip():
                continue
            try:
                data = _with_defaults(_decoded(line), self._defaults)
                job = Job.parse(data)
            except InvalidJob as error:
                self._refuse(number, error)
            else:
                self._lines_of.setdefault(job.id, []).append(number)
                if "id" not in data:
                    self._drawn.add(job.id)
                yield job
        self._is_at_end = True

    def accepted(self, job_id: JobId) -> None:
        """The queue has this job."""
        self._has_accepted = True
        is_drawn = job_id in self._drawn
        number = self._settle(job_id)
        if is_drawn:
            self._last_drawn = max(self._last_drawn, number)

    def refused(self, job: Job, error: TidemillError) -> None:
        """The queue would not have this job."""
        number = self._settle(job.id)
        if isinstance(error, QueueFull):
            self._without_room.append(number)
        self._refuse(number, error)

    def say_where_to_go_on(self) -> None:
        """Report where the file is to be taken up again, if a part of it was submitted, or may have been."""
        unknown = [number for numbers in self._lines_of.values() for number in numbers]
        unread = [] if self._is_at_end or self._without_room else [self._num_read + 1]
        first = min([*self._without_room, *unknown, *unread], default=0)
        if not first or not (self._has_accepted or unknown):
            return
        drawn = [number for job_id in self._drawn for number in self._lines_of[job_id]]
        last = max([self._last_drawn, *drawn])
        warning = f", as some to line {last} may have been: without an id they would run twice"
        self._report(
            f"{self._name}: go on from line {first}; all good lines before it were submitted"
            + (warning if last > first or drawn else "")
        )

    def _settle(self, job_id: JobId) -> int:
        """The fate of the first line with this id is known: which line that is."""
        numbers = self._lines_of[job_id]
        number = numbers.pop(0)
        if not numbers:
            del self._lines_of[job_id]
            self._drawn.discard(job_id)
        return number

    @property
    def exit_code(self) -> ExitCode:
        """What the lines seen so far deserve."""
        if self._without_room:
            return ExitCode.QUEUE_FULL
        return ExitCode.USAGE if self._num_bad else ExitCode.OK

    def _refuse(self, number: int, error: TidemillError) -> None:
        self._num_bad += 1
        self._report(f"{self._name}:{number}: {error}")


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except UnicodeDecodeError as error:
        raise InvalidJob(f"not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise InvalidJob(f"not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise InvalidJob("not JSON that can be read: nested too deeply") from error
    if not isinstance(data, dict):
        raise InvalidJob(f"expected a JSON object, got {type(data).__name__}")
    return data


def _with_defaults(data: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What the line says wins, also inside `params`."""
    merged = {**defaults, **data}
    params = data.get("params", {})
    if "params" in defaults and isinstance(params, dict):
        merged["params"] = {**_yielding(defaults["params"], params), **params}
    return merged


def _yielding(defaults: Mapping[str, Any], params: Mapping[str, Any]) -> Mapping[str, Any]:
    """`defaults` without what a line says in other words."""
    spelt_otherwise = {"structured_outputs"} if "response_format" in params else set()
    return {name: value for name, value in defaults.items() if name not in spelt_otherwise}
