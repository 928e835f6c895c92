"""Tidemill: batch inference through a durable queue.

    from tidemill import BlockingClient, Job

    with BlockingClient(queue="smollm2") as client:
        print(client.result(client.submit(Job(prompt="Once upon a time"))).text)

The submodules: `jobs` (the contract), `errors`, `client` and `blocking` (the SDK), `queue` (the moves
of a job).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tidemill.errors import (
    ConfigurationError,
    ErrorCode,
    InvalidJob,
    JobConflict,
    JobFailed,
    JobUnknown,
    QueueFull,
    QueueUnavailable,
    TidemillError,
)
from tidemill.jobs import Choice, Delta, FinishReason, Job, JobId, Message, Priority, Result, Status
from tidemill.params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from tidemill.blocking import BlockingClient
    from tidemill.client import Client, ClientSettings

__all__ = [
    "BlockingClient",
    "Choice",
    "Client",
    "ClientSettings",
    "ConfigurationError",
    "Delta",
    "ErrorCode",
    "FinishReason",
    "InvalidJob",
    "Job",
    "JobConflict",
    "JobFailed",
    "JobId",
    "JobUnknown",
    "Message",
    "Priority",
    "QueueFull",
    "QueueUnavailable",
    "Result",
    "SamplingParams",
    "Status",
    "StructuredOutputs",
    "TidemillError",
]


def __getattr__(name: str) -> Any:
    """The clients, imported when first asked for: those who need only the contract load no redis."""
    if name == "BlockingClient":
        return import_module("tidemill.blocking").BlockingClient
    if name in {"Client", "ClientSettings"}:
        return getattr(import_module("tidemill.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
