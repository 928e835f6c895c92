"""The whole truth about a queue, read key by key, against what its moves must keep true."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import redis

Hash = dict[str, str]

EXPIRING = (
    *("results", "readers", "receipt", "cancelled", "worker", "workers"),
    *("server", "dead", "doorbell", "card"),
)
"""Kinds of keys that never last, whatever there is to do."""


@dataclass
class Audit:
    """Read one queue and list what is wrong with it.

    Every unfinished job is in exactly one place, every pending entry is under a lease of the
    worker that the job names, all counters equal what they count, each tenant stands in line by what it
    was served and is promised, what readers may stream is the present generation, and whatever is left
    of finished jobs expires: once all are, no key but the weights lasts.
    """

    client: redis.Redis
    prefix: str
    faults: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        self.jobs = {key: self._hash(f"job:{key}") for key in self._names("job:")}
        self._check_entries()
        self._check_sets()
        self._check_suspects()
        self._check_checkpoints()
        self._check_load()
        self._check_accounts()
        self._check_readers()
        self._check_lifetimes()
        return self.faults

    def _names(self, kind: str) -> list[str]:
        pattern = f"{self.prefix}{kind}"
        keys = [key.decode() for key in self.client.scan_iter(f"{_escaped(pattern)}*", count=1000)]
        return [key.removeprefix(pattern) for key in keys]

    def _hash(self, key: str) -> Hash:
        raw = self.client.hgetall(self.prefix + key)
        return {k.decode(): v.decode(errors="replace") for k, v in raw.items()}

    def _expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.faults.append(f"{what}: found {found}, expected {expected}")

    def _in_state(self, *states: str) -> dict[str, Hash]:
        return {job_id: job for job_id, job in self.jobs.items() if job["state"] in states}

    def _check_entries(self) -> None:
        found, pending = {}, {}
        for place in ("jobs", "returned"):
            for lane in self._names(f"{place}:"):
                key = f"{self.prefix}{place}:{lane}"
                for entry, fields in self.client.xrange(key):
                    found[place, lane, entry.decode()] = fields[b"id"].decode()
                if self.client.xinfo_groups(key):
                    for item in self.client.xpending_range(key, "workers", "-", "+", 10_000):
                        entry = item["message_id"].decode()
                        pending[place, lane, entry] = item["consumer"].decode()
        live = self._in_state("waiting", "running")
        self._expect("entries", found, {_place(job): job_id for job_id, job in live.items()})
        running = self._in_state("running").values()
        self._expect("pending", pending, {_place(job): job["worker"] for job in running})

    def _members(self, key: str) -> set[str]:
        return {member.decode() for member in self.client.zrange(self.prefix + key, 0, -1)}

    def _check_sets(self) -> None:
        self._expect("leases", self._members("leases"), set(self._in_state("running")))
        self._expect("delayed", self._members("delayed"), set(self._in_state("delayed")))
        idle = self._in_state("waiting", "delayed").items()
        self._expect("deadlines", self._members("deadlines"), {i for i, job in idle if "deadline" in job})
        for job in self._in_state("waiting").values():
            if job["tenant"] not in self._members(f"active:{job['version']}:{job['priority']}"):
                self.faults.append(f"nobody will look for {job}")

    def _check_suspects(self) -> None:
        for job_id, job in self.jobs.items():
            if job.get("alone", "held") not in ("held", "begun"):
                self.faults.append(f"{job_id} is {job['alone']}")
            if "alone" in job and (job["state"] != "running" or int(job.get("failures", 0)) < 1):
                self.faults.append(f"{job_id}, {job['state']}, is to be run alone")

    def _check_checkpoints(self) -> None:
        for job_id, job in self._in_state("waiting", "running", "delayed").items():
            origin, tokens = int(job.get("origin", 0)), int(job.get("tokens", 0))
            marks = [f"{origin}-1"] if origin and "stream" in job else []
            ids = [entry.decode() for entry, _ in self.client.xrange(f"{self.prefix}deltas:{job_id}")]
            self._expect(f"marks of {job_id}", [entry for entry in ids if not entry.endswith("-0")], marks)
            pieces = [int(entry.removesuffix("-0")) for entry in ids if entry.endswith("-0")]
            self._expect(f"order of {job_id}", pieces, sorted(piece for piece in pieces if piece > origin))
            self._expect(f"end of {job_id}", pieces[-1:], [origin + tokens] if tokens else [])

    def _check_load(self) -> None:
        live = self._in_state("waiting", "running", "delayed").values()
        counted = Counter(_lane(job) for job in live)
        if counted:
            counted["total"] = counted.total()
        load = {lane: int(count) for lane, count in self._hash("load").items()}
        self._expect("load", load, dict(counted))

    def _check_accounts(self) -> None:
        accounts = {
            lane: [float(part) for part in text.split()]
            for lane, text in self._hash("accounts").items()
            if lane != "total"
        }
        busy, resting = set(self._hash("load")) - {"total"}, self._members("resting")
        self._expect("accounts", set(accounts), busy | resting)
        self._expect("lanes busy and at rest", busy & resting, set())
        promised: Counter[str] = Counter()
        for job_id, job in self.jobs.items():
            promised[_lane(job)] += int(job.get("promised", 0))
            if "promised" in job and job["state"] != "running":
                self.faults.append(f"{job_id}, {job['state']}, is promised {job['promised']}")
        found = {lane: promise for lane, (_, promise) in accounts.items() if promise}
        self._expect("promised", found, dict(+promised))
        for kind in self._names("active:"):
            self._check_line(kind, accounts)

    def _check_line(self, kind: str, accounts: dict[str, list[float]]) -> None:
        for member, standing in self.client.zrange(f"{self.prefix}active:{kind}", 0, -1, withscores=True):
            tenant = member.decode()
            served, promised = accounts[f"{kind}:{tenant}"]
            weight = float(self._hash("weights").get(tenant, 1))
            self._expect(f"place of {tenant}", standing, served + promised / weight)

    def _check_readers(self) -> None:
        """Memory that results take is asked for by these names."""
        keys = {name: f"{self.prefix}results:{name}" for name in self._names("results:")}
        streams = {name: key for name, key in keys.items() if self.client.type(key) == b"stream"}
        unread = {name for name, key in streams.items() if self.client.xlen(key)}
        self._expect("unread, and not among the readers", unread - self._members("readers"), set())

    def _check_lifetimes(self) -> None:
        for job_id, job in self.jobs.items():
            expires = self.client.pttl(f"{self.prefix}job:{job_id}") != -1  # or has expired meanwhile
            self._expect(f"expiry of {job_id}", expires, job["state"] == "done")
            self._expect(f"payload of {job_id}", "payload" in job, job["state"] != "done")
        forever = [key for key in self._names("") if self.client.pttl(self.prefix + key) == -1]
        if self._in_state("waiting", "running", "delayed"):
            forever = [key for key in forever if key.partition(":")[0] in EXPIRING]
        self._expect("keys without expiry", [key for key in forever if key != "weights"], [])


def _lane(job: Hash) -> str:
    return f"{job['version']}:{job['priority']}:{job['tenant']}"


def _place(job: Hash) -> tuple[str, str, str]:
    return job.get("place", "jobs"), _lane(job), job["entry"]


def _escaped(pattern: str) -> str:
    return pattern.replace("[", r"\[").replace("?", r"\?").replace("*", r"\*")
