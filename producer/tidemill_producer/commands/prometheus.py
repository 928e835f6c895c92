"""The depth of queues as Prometheus reads it: text exposition format 0.0.4, gauges only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tidemill.moves import QueueDepth

Sample = tuple[Mapping[str, str], float]


def exposition(depths: Mapping[str, QueueDepth]) -> str:
    """The metrics `tidemill_queue_*` of each queue by name. Times are seconds."""
    lines: list[str] = []
    for name, help_text, samples in _families(depths):
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels(labels)} {value:g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _families(depths: Mapping[str, QueueDepth]) -> Iterator[tuple[str, str, Iterable[Sample]]]:
    def each(field: str) -> list[Sample]:
        return [({"queue": queue}, getattr(depth, field)) for queue, depth in depths.items()]

    yield "tidemill_queue_depth", "Jobs that want a worker now or later.", each("total")
    yield "tidemill_queue_running_jobs", "Jobs that a worker holds.", each("running")
    yield "tidemill_queue_delayed_jobs", "Jobs that wait out a backoff.", each("delayed")
    yield "tidemill_queue_dead_letters", "Jobs given up after too many attempts.", each("dead_letters")
    yield (
        "tidemill_queue_waiting_jobs",
        "Jobs that no worker holds, by priority and tenant.",
        [
            ({"queue": queue, "priority": priority, "tenant": tenant}, count)
            for queue, depth in depths.items()
            for (priority, tenant), count in depth.by_tenant.items()
        ],
    )
    yield (
        "tidemill_queue_oldest_waiting_seconds",
        "Age of the longest waiting job; 0 if none waits.",
        [({"queue": queue}, depth.oldest_waiting or 0.0) for queue, depth in depths.items()],
    )


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
