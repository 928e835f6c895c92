"""What each tenant must have been charged, kept beside the queue that does it."""

from __future__ import annotations

from collections import Counter

import redis

from tidemill.jobs import JobId, Priority
from tidemill.keys import lane
from tidemill.queue import Queue

WEIGHTS = {"t1": 1.0, "t2": 2.0}
"""Powers of two, so that sums in any order are the same."""


class AccountBook:
    """Follows one queue, of the tenants that have a weight here.

    An account holds what its jobs were served, and what its tenant was lifted by when it had been away.
    The former must be exact; the latter may grow only when the tenant comes to the line, and then to
    what another one was served.
    """

    def __init__(self, client: redis.Redis, queue: Queue) -> None:
        self._client = client
        self._queue = queue
        self._lanes: dict[JobId, str] = {}
        self._served: Counter[JobId] = Counter()
        self._charged: Counter[str] = Counter()
        self._lifted: Counter[str] = Counter()
        self._levels: set[float] = {0.0}
        self._in_line: set[str] = set()

    def open(self, job_id: JobId, priority: str, tenant: str) -> None:
        """A new job is in the queue."""
        self._lanes[job_id] = lane(1, Priority(priority), tenant)

    def serve(self, job_id: JobId, units: int) -> None:
        """A job was reported to have been served so much altogether."""
        more = max(0, units - self._served[job_id])
        self._served[job_id] += more
        self._charged[self._lanes[job_id]] += more / WEIGHTS[self._lanes[job_id].split(":")[2]]

    def check(self) -> None:
        """Compare; what is found is where the next comparison starts."""
        for job_id in self._lanes:
            found = self._client.hget(self._queue.keys.job(job_id), "served")
            assert int(found or 0) == self._served[job_id]
        accounts = self._read()
        if not accounts:  # nobody has jobs: all begin anew
            self._charged.clear()
            self._lifted.clear()
        for name, served in accounts.items():
            lifted = served - self._charged[name]
            assert lifted == self._lifted[name] or self._was_lifted(name, lifted)
            self._lifted[name] = lifted
        self._levels = {0.0, *accounts.values(), *self._clock()}
        self._in_line = self._line()

    def _was_lifted(self, name: str, lifted: float) -> bool:
        to = lifted + self._charged[name]
        return name not in self._in_line and lifted > self._lifted[name] and to in self._levels

    def _read(self) -> dict[str, float]:
        fields = self._client.hgetall(self._queue.keys.accounts)
        return {name.decode(): float(text.split()[0]) for name, text in fields.items() if name != b"total"}

    def _clock(self) -> list[float]:
        return [float(value) for value in self._client.hvals(f"{self._queue.keys.prefix}clock")]

    def _line(self) -> set[str]:
        return {
            lane(1, priority, tenant.decode())
            for priority in Priority
            for tenant in self._client.zrange(self._queue.keys.active(1, priority), 0, -1)
        }
