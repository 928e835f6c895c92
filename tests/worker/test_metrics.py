"""Metrics: read back from the exposition, under both names."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import RemoteDisconnected

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tests.worker.factories import make_held, make_output, make_stats
from tidemill.errors import ConfigurationError, QueueUnavailable
from tidemill.jobs import Choice, FinishReason, JobId, Result, Status
from tidemill_worker.endpoint import Endpoint, Health, _Handler
from tidemill_worker.generation import Marks
from tidemill_worker.metrics import HISTOGRAMS, REASONS, TTFT_BUCKETS, Metrics
from tidemill_worker.redis_failures import RedisFailure
from tidemill_worker.service import ServiceStats

LABELS = {"model_name": "tiny", "engine": "0"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset({**LABELS, **labels}.items())]


def test_what_waits_in_the_service_is_exported() -> None:
    metrics = Metrics("tiny")
    stats = ServiceStats(intake_is_paused=True, num_unrecorded=3, unrecorded_bytes=1000)
    metrics.watch_service(lambda: stats)
    assert value(metrics, "tidemill_intake_paused") == 1
    assert value(metrics, "tidemill_results_waiting") == 3
    assert value(metrics, "tidemill_results_waiting_bytes") == 1000


def test_failures_of_redis_are_counted_from_0_on() -> None:
    metrics = Metrics("tiny")
    metrics.unreachable(QueueUnavailable("Redis cannot save"))
    counts = [value(metrics, "tidemill_redis_failures_total", reason=reason) for reason in RedisFailure]
    assert (len(counts), sum(counts)) == (7, 1)
    assert value(metrics, "tidemill_redis_failures_total", reason="other") == 1


@pytest.mark.parametrize("prefix", ["tidemill_", "vllm:"])
def test_latencies_are_measured_from_the_claim(prefix: str) -> None:
    clock = Clock()
    metrics = Metrics("tiny", clock)
    held = make_held(claimed=10.0)
    clock.now = 10.5
    metrics.progressed(held, make_output("job/1", 1))
    clock.now = 10.7
    metrics.progressed(held, make_output("job/1", 2))
    clock.now = 12.7
    marks = Marks(added=10.0, scheduled=10.2, first_token=10.5, finished=12.7)
    metrics.progressed(held, make_output("job/1", 3, finish_reason=FinishReason.STOP, marks=marks))

    def total(name: str) -> tuple[float, float]:
        return value(metrics, f"{prefix}{name}_sum"), value(metrics, f"{prefix}{name}_count")

    e2e = "e2e_request_latency_seconds" if prefix == "vllm:" else "request_latency_seconds"
    assert total("time_to_first_token_seconds") == (pytest.approx(0.5), 1)
    assert total("inter_token_latency_seconds") == (pytest.approx(2.2), 2)
    assert total("request_queue_time_seconds") == (pytest.approx(0.2), 1)
    assert total("request_prefill_time_seconds") == (pytest.approx(0.3), 1)
    assert total("request_decode_time_seconds") == (pytest.approx(2.2), 1)
    assert total(e2e) == (pytest.approx(2.7), 1)


def test_a_prefill_step_without_a_token_is_no_first_token() -> None:
    metrics = Metrics("tiny")
    metrics.progressed(make_held(), make_output("job/1"))
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0


@pytest.mark.parametrize(
    ("status", "reason", "name"),
    [
        (Status.SUCCEEDED, FinishReason.STOP, "stop"),
        (Status.SUCCEEDED, FinishReason.LENGTH, "length"),
        (Status.CANCELLED, FinishReason.CANCELLED, "abort"),
        (Status.EXPIRED, FinishReason.EXPIRED, "abort"),
        (Status.FAILED, FinishReason.ERROR, "error"),
    ],
)
def test_requests_are_counted_by_how_they_ended(status: Status, reason: FinishReason, name: str) -> None:
    """request_success{abort} was always 0 (vllm#31503)."""
    metrics = Metrics("tiny")
    assert value(metrics, "vllm:request_success_total", finished_reason=name) == 0
    metrics.recorded(make_held(), Result(id=JobId("job"), status=status, finish_reason=reason))
    assert value(metrics, "vllm:request_success_total", finished_reason=name) == 1
    assert value(metrics, "tidemill_requests_finished_total", finished_reason=name) == 1


def test_every_reason_has_a_name_in_the_metrics() -> None:
    assert set(REASONS) == set(FinishReason)


def test_each_generation_counts_by_how_it_ended_and_the_request_by_their_number() -> None:
    metrics = Metrics("tiny")
    endings = (FinishReason.STOP, FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.CANCELLED)
    first, *others = (Choice(index=index, finish_reason=reason) for index, reason in enumerate(endings))
    metrics.recorded(
        make_held(),
        Result(
            id=JobId("job"),
            status=Status.CANCELLED,
            finish_reason=first.finish_reason,
            alternatives=tuple(others),
        ),
    )
    counts = [
        value(metrics, "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    ]
    assert counts == [1, 1, 2, 0]
    for name in ("vllm:request_params_n", "tidemill_request_params_n"):
        assert (value(metrics, f"{name}_sum"), value(metrics, f"{name}_count")) == (4, 1)


def test_latencies_between_tokens_are_those_of_one_generation() -> None:
    """Given two generations in turn, then the time since the other's token is no latency."""
    clock = Clock()
    metrics, held = Metrics("tiny", clock), make_held()
    for now, choice in ((1.0, 0), (2.0, 1), (5.0, 0), (7.0, 1)):
        clock.now = now
        metrics.progressed(held, make_output("job/1", 1, choice=choice))
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == 4.0 + 5.0
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 1.0 + 2.0


def test_the_engine_is_read_when_asked() -> None:
    metrics = Metrics("tiny")
    stats = make_stats(num_running=3, num_waiting=2, kv_usage=0.25, num_preemptions=4, generation_tokens=99)
    current = [stats]
    metrics.watch(lambda: current[0], has_swap_space=False)
    for running, usage in (
        ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
        ("tidemill_requests_running", "tidemill_kv_cache_usage_ratio"),
    ):
        assert (value(metrics, running), value(metrics, usage)) == (3, 0.25)
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "vllm:num_preemptions_total") == 4
    assert value(metrics, "tidemill_generation_tokens_total") == 99
    current[0] = make_stats(num_running=0)
    assert value(metrics, "vllm:num_requests_running") == 0


def test_preemptions_and_swapped_blocks_are_told_apart() -> None:
    metrics = Metrics("tiny")
    metrics.watch(
        lambda: make_stats(
            num_preemptions=5, num_swap_preemptions=3, blocks_swapped_out=40, blocks_swapped_in=30
        ),
        has_swap_space=True,
    )
    by_kind = [
        value(metrics, "tidemill_preemptions_by_kind_total", kind=kind) for kind in ("swap", "recompute")
    ]
    assert by_kind == [3, 2]
    assert value(metrics, "tidemill_preemptions_total") == sum(by_kind)
    assert value(metrics, "tidemill_swapped_blocks_total", direction="out") == 40
    assert value(metrics, "tidemill_swapped_blocks_total", direction="in") == 30


def test_hits_in_the_swap_space_are_those_of_an_outer_tier() -> None:
    """As in vLLM, the outer tier is asked for what the inner one does not have, and each counts its hits."""
    metrics = Metrics("tiny")
    metrics.watch(
        lambda: make_stats(
            prefix_query_tokens=100, prefix_hit_tokens=70, swap_hit_tokens=30, swap_usage=0.75
        ),
        has_swap_space=True,
    )
    for inner, outer in (
        ("vllm:prefix_cache", "vllm:external_prefix_cache"),
        ("tidemill_prefix_cache", "tidemill_swap_cache"),
    ):
        inner_counts = value(metrics, f"{inner}_queries_total"), value(metrics, f"{inner}_hits_total")
        outer_counts = value(metrics, f"{outer}_queries_total"), value(metrics, f"{outer}_hits_total")
        assert (inner_counts, outer_counts) == ((100, 40), (60, 30))
    assert value(metrics, "tidemill_swap_usage_ratio") == 0.75


@pytest.mark.parametrize("outer", ["vllm:external_prefix_cache", "tidemill_swap_cache"])
def test_nothing_is_looked_up_in_a_swap_space_that_is_not_there(outer: str) -> None:
    metrics = Metrics("tiny")
    metrics.watch(lambda: make_stats(prefix_query_tokens=100, prefix_hit_tokens=70), has_swap_space=False)
    assert value(metrics, f"{outer}_queries_total") == value(metrics, f"{outer}_hits_total") == 0
    assert value(metrics, "vllm:prefix_cache_queries_total") == 100


def test_claims_and_their_time_in_the_queue_are_counted() -> None:
    metrics = Metrics("tiny")
    metrics.claimed([make_held("a", queued=1.5), make_held("b", queued=2.0)])
    assert value(metrics, "tidemill_jobs_claimed_total") == 2
    assert value(metrics, "tidemill_job_queue_time_seconds_sum") == 3.5


def test_the_buckets_are_vllms() -> None:
    metrics = Metrics("tiny")
    bounds = {
        float(dict(labels)["le"])
        for name, labels in samples(metrics)
        if name == "vllm:time_to_first_token_seconds_bucket"
    }
    assert bounds == {*TTFT_BUCKETS, float("inf")}
    assert {vllm for _, vllm, *_ in HISTOGRAMS.values()} >= {"vllm:inter_token_latency_seconds"}


@pytest.fixture
def health() -> list[Health]:
    return [Health(ok=True, details={"running": 1})]


@pytest.fixture
def endpoint(health: list[Health]) -> Iterator[Endpoint]:
    opened = Endpoint("127.0.0.1", 0, metrics=Metrics("tiny").exposition, health=lambda: health[0])
    yield opened
    opened.close()


def get(endpoint: Endpoint, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}{path}", timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_endpoint_serves_metrics_and_health(endpoint: Endpoint, health: list[Health]) -> None:
    status, text = get(endpoint, "/metrics")
    assert status == 200
    assert "vllm:time_to_first_token_seconds_count" in text
    status, text = get(endpoint, "/health")
    assert (status, json.loads(text)) == (200, {"ok": True, "running": 1})
    health[0] = Health(ok=False, details={"engine": "stopped"})
    assert get(endpoint, "/health")[0] == 503
    assert get(endpoint, "/")[0] == 404


def test_a_port_in_use_is_a_configuration_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"^metrics_port: cannot listen on 127.0.0.1:{port}"):
            Endpoint("127.0.0.1", port, metrics=bytes, health=lambda: Health(ok=True, details={}))


def test_a_fault_of_the_endpoint_is_one_line_of_the_log() -> None:
    def broken() -> bytes:
        raise RuntimeError("no numbers")

    endpoint = Endpoint("127.0.0.1", 0, metrics=broken, health=lambda: Health(ok=True, details={}))
    try:
        with capture_logs() as logs, pytest.raises(RemoteDisconnected):
            get(endpoint, "/metrics")
        assert get(endpoint, "/health")[0] == 200
    finally:
        endpoint.close()
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("endpoint_failed", "warning")]


def test_a_client_that_asks_for_nothing_is_let_go(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a thread: without a limit, idle connections would add up."""
    monkeypatch.setattr(_Handler, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as client:
        assert client.recv(1) == b""
