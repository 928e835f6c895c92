"""Every name that Tidemill uses in Redis, and the only place where one is spelled.

All keys of a queue share one hash tag, so that any script may touch any of them in a cluster. The
scripts get the names from `lua_names`, as tables: `K.leases`, `F.state`, `E.id`.

    job:<id>                    hash    the job; expires with its result
    jobs:<lane>                 stream  waiting and running jobs, ids only; group `workers`
    returned:<lane>             stream  the same for jobs put back at the head; served first
    leases                      zset    running jobs by the end of their lease
    deadlines                   zset    waiting and delayed jobs by deadline
    delayed                     zset    jobs in backoff by the end of it
    active:<version>:<priority> zset    tenants with waiting jobs, by service: received and promised
    accounts                    hash    service received and promised per lane; in `total`, a job's mean
    clock                       hash    service received by whom was served last, per priority
    resting                     zset    lanes that have an account but no jobs, by the end of the last one
    weights                     hash    tenant to weight; configuration, never expires
    load                        hash    unfinished jobs per lane, and their `total`
    doorbell                    stream  one entry; idle workers block on it
    results:<name>              stream  results for one reader, or a group of them
    readers                     zset    names of result streams by the end of the stream
    deltas:<id>                 stream  what a running job has generated: checkpoint and stream
    dead                        stream  jobs that were given up, with payload
    receipt:<worker>            hash    the last claim and reclaim, to answer a repeat of it
    cancelled:<worker>          set     jobs that it holds and that somebody wants to end
    worker:<worker>             string  its last report
    workers                     zset    workers by the end of their last report
    server                      hash    the run id of the server, and when that was first seen
    card                        hash    the model card

A lane is <wire version>:<priority>:<tenant>.
"""

from __future__ import annotations

from enum import StrEnum

from tidemill.jobs import JobId, Priority

GROUP = "workers"
"""The one consumer group of every job stream."""

DEFAULT_RESULTS = "default"
"""Reply name of answers to what nobody can be named for: undecodable entries."""

TOTAL = "total"
"""Field of `load` and of `accounts` beside the lanes."""

RESTARTED, ENDED = "-1", "-2"
"""How the ids of a delta stream's entries end that are no delta; that of a delta ends in `-0`. What
stands before is the number of tokens so far, those of dropped generations included."""


class Key(StrEnum):
    """Keys, or prefixes of keys where they end in a colon, below the queue's own prefix."""

    JOB = "job:"
    JOBS = "jobs:"
    RETURNED = "returned:"
    LEASES = "leases"
    DEADLINES = "deadlines"
    DELAYED = "delayed"
    ACTIVE = "active:"
    ACCOUNTS = "accounts"
    CLOCK = "clock"
    RESTING = "resting"
    WEIGHTS = "weights"
    LOAD = "load"
    DOORBELL = "doorbell"
    RESULTS = "results:"
    READERS = "readers"
    DELTAS = "deltas:"
    DEAD = "dead"
    RECEIPT = "receipt:"
    CANCELLED = "cancelled:"
    WORKER = "worker:"
    WORKERS = "workers"
    SERVER = "server"
    CARD = "card"


class JobField(StrEnum):
    """Fields of a job's hash. Those at their default are absent: a waiting job must be small."""

    STATE = "state"
    PAYLOAD = "payload"
    DIGEST = "digest"
    VERSION = "version"
    PRIORITY = "priority"
    TENANT = "tenant"
    SEED = "seed"
    STREAM = "stream"
    REPLIES = "replies"
    """`name=entry name=entry`; the entry is empty until there is a result."""
    SUBMITTED = "submitted"
    DEADLINE = "deadline"
    PLACE = "place"
    """`returned` if its entry is in that stream; absent for the ordinary one."""
    ENTRY = "entry"
    WORKER = "worker"
    ATTEMPT = "attempt"
    FAILURES = "failures"
    ALONE = "alone"
    """Of a running job that one more failure may bury: `held`, or `begun` once its holder runs it."""
    TOKENS = "tokens"
    """Tokens checkpointed, of the present generations."""
    FINGERPRINT = "fingerprint"
    """Of the holder, or of the last one: of who made the checkpoint, if there is one."""
    ORIGIN = "origin"
    """Tokens of earlier generations, dropped because a worker of another fingerprint began anew."""
    BASE = "base"
    """Tokens that were checkpointed when the running attempt began."""
    CLAIMED = "claimed"
    SERVED = "served"
    """Units of service that its tenant is charged for it."""
    PROMISED = "promised"
    """Units that it is expected to be served beyond that; of running jobs only."""
    CANCEL = "cancel"
    RELEASED = "released"
    """Token of the holder that released it last."""
    FINISHER = "finisher"
    """Token of the holder, or name of the move, that recorded the result."""
    FINISHED = "finished"
    STATUS = "status"


class EntryField(StrEnum):
    """Fields of stream entries."""

    ID = "id"
    RESULT = "result"
    DELTA = "delta"
    ENDED = "ended"
    RESTART = "restart"
    """Stands between what is void and the deltas of the generations that began anew."""
    RING = "ring"
    PAYLOAD = "payload"
    FAILURES = "failures"
    WORKER = "worker"


class CardField(StrEnum):
    """Fields of the model card."""

    CARD = "card"
    TOKENIZER = "tokenizer"


class QueueKeys:
    """The keys of one queue."""

    def __init__(self, queue: str) -> None:
        self.prefix = f"tidemill:{{{queue}}}:"

    def _key(self, key: Key, rest: str = "") -> str:
        return f"{self.prefix}{key}{rest}"

    def job(self, job_id: JobId) -> str:
        return self._key(Key.JOB, job_id)

    def jobs(self, version: int, priority: Priority, tenant: str) -> str:
        return self._key(Key.JOBS, lane(version, priority, tenant))

    def returned(self, version: int, priority: Priority, tenant: str) -> str:
        return self._key(Key.RETURNED, lane(version, priority, tenant))

    def results(self, name: str) -> str:
        return self._key(Key.RESULTS, name)

    @property
    def readers(self) -> str:
        return self._key(Key.READERS)

    def deltas(self, job_id: JobId) -> str:
        return self._key(Key.DELTAS, job_id)

    def cancelled(self, worker: str) -> str:
        return self._key(Key.CANCELLED, worker)

    def worker(self, name: str) -> str:
        return self._key(Key.WORKER, name)

    def active(self, version: int, priority: Priority) -> str:
        return self._key(Key.ACTIVE, f"{version}:{priority}")

    @property
    def leases(self) -> str:
        return self._key(Key.LEASES)

    @property
    def deadlines(self) -> str:
        return self._key(Key.DEADLINES)

    @property
    def delayed(self) -> str:
        return self._key(Key.DELAYED)

    @property
    def load(self) -> str:
        return self._key(Key.LOAD)

    @property
    def accounts(self) -> str:
        return self._key(Key.ACCOUNTS)

    @property
    def resting(self) -> str:
        return self._key(Key.RESTING)

    @property
    def weights(self) -> str:
        return self._key(Key.WEIGHTS)

    @property
    def doorbell(self) -> str:
        return self._key(Key.DOORBELL)

    @property
    def dead(self) -> str:
        return self._key(Key.DEAD)

    @property
    def workers(self) -> str:
        return self._key(Key.WORKERS)

    @property
    def server(self) -> str:
        return self._key(Key.SERVER)

    @property
    def card(self) -> str:
        return self._key(Key.CARD)


def lane(version: int, priority: Priority, tenant: str) -> str:
    """Jobs that share a stream."""
    return f"{version}:{priority}:{tenant}"


def split_lane(text: str) -> tuple[int, Priority, str]:
    """Inverse of `lane`."""
    version, priority, tenant = text.split(":")
    return int(version), Priority(priority), tenant


def lua_names() -> str:
    """All of the above as Lua; a script finds the queue's prefix in KEYS[1]."""
    keys = ", ".join(f"{key.name.lower()} = KEYS[1] .. '{key}'" for key in Key)
    fields = ", ".join(f"{field.name.lower()} = '{field}'" for field in JobField)
    light = ", ".join(f"'{field.name.lower()}'" for field in JobField if field is not JobField.PAYLOAD)
    entries = ", ".join(f"{field.name.lower()} = '{field}'" for field in EntryField)
    return (
        f"local GROUP, DEFAULT_RESULTS, TOTAL = '{GROUP}', '{DEFAULT_RESULTS}', '{TOTAL}'\n"
        f"local RESTARTED, ENDED = '{RESTARTED}', '{ENDED}'\n"
        f"local K = {{{keys}}}\n"
        f"local F = {{{fields}}}\n"
        f"local LIGHT = {{{light}}}\n"
        f"local E = {{{entries}}}\n"
    )
