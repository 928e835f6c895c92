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
        self._has_accepted = False
        self._without_room: list[int] = []
        self._name = name
        self._lines = lines
        self._defaults = defaults
        self._report = report
        self._line_of: dict[JobId, int] = {}

    def __iter__(self) -> Iterator[Job]:
        for number, line in enumerate(self._lines, start=1):
            if self._without_room:
                self._report(f"{self._name}:{number}: not submitted, nor is any line after it")
                return
            if not line.strip():
                continue
            try:
                job = Job.parse(_with_defaults(_decoded(line), self._defaults))
            except InvalidJob as error:
                self._refuse(number, error)
            else:
                self._line_of[job.id] = number
                yield job

    def accepted(self, job_id: JobId) -> None:
        """The queue has this job."""
        self._has_accepted = True
        self._line_of.pop(job_id, None)

    def refused(self, job: Job, error: TidemillError) -> None:
        """The queue would not have this job."""
        number = self._line_of.pop(job.id, 0)
        if isinstance(error, QueueFull):
            self._without_room.append(number)
        self._refuse(number, error)

    def say_where_to_go_on(self) -> None:
        """Report where the file is to be taken up again, if a part of it was submitted."""
        left = [*self._without_room, *self._line_of.values()]
        if left and self._has_accepted:
            self._report(
                f"{self._name}: go on from line {min(left)}; all good lines before it were submitted"
            )

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
