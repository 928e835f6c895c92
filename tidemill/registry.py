"""The registry of a queue's workers: what each serves, runs and has room for, by its own report.

A report expires unless the next one comes in time, so that who is listed was alive lately.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import ConfigDict, Field

from tidemill.schema import Wire


class WorkerState(StrEnum):
    """What a worker is doing, as far as the queue is concerned."""

    SERVING = "serving"
    DRAINING = "draining"
    """It takes no more jobs, and ends when it holds none."""
    STALLED = "stalled"
    """Its engine has work and makes no progress; it is about to exit."""
    UNKNOWN = "unknown"
    """Something that only a newer version has a word for. Never reported."""

    @classmethod
    def _missing_(cls, value: object) -> WorkerState:
        return cls.UNKNOWN


class WorkerReport(Wire):
    """One worker's account of itself, of one moment.

    A field that a newer worker adds is passed over, and a state that it adds is `unknown`, so that any
    command can list any worker.
    """

    model_config = ConfigDict(extra="ignore")

    name: str
    """Unique per start of a process; what job views and results call `worker`."""
    queue: str
    model: str
    host: str
    pid: int
    version: str
    """Of Tidemill."""
    fingerprint: str
    """As on its model card: workers of another one do not go on with its checkpoints."""
    device: str
    state: WorkerState
    capacity: int = Field(ge=0)
    """Generations that it can hold at once."""
    running: int = Field(ge=0)
    """Generations in the batch."""
    waiting: int = Field(ge=0)
    """Generations that wait for a place in it."""
    held: int = Field(ge=0)
    """Jobs under a lease of this worker."""
    unrecorded: int = Field(ge=0)
    """Jobs that have ended and whose result Redis has not taken yet."""
    kv_usage: float = Field(ge=0.0, le=1.0)
    uptime: float = Field(ge=0.0)
    """Seconds since it began to serve."""
    heartbeat: float = Field(gt=0.0)
    """Seconds between two reports."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the registry has it."""

    report: WorkerReport
    age: float
    """Seconds since the report was made, by Redis's clock."""
