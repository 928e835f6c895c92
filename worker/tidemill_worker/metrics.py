"""What the worker counts, under its own names and under vLLM's, and the endpoint that serves it.

Every `tidemill_*` metric that vLLM also has is exported a second time as `vllm:*` with vLLM's
labels and buckets, so that dashboards made for vLLM show this worker unchanged. Intervals are
taken from one monotonic clock; a preemption counts into the interval in which it happens. As there,
each generation of a job with several counts for itself, where something is counted or timed by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidemill.errors import QueueUnavailable
from tidemill.jobs import FinishReason, Result
from tidemill_worker.engine import EngineStats, StepOutput
from tidemill_worker.generation import Marks
from tidemill_worker.held import HeldJob
from tidemill_worker.redis_failures import RedisFailure, failure_of
from tidemill_worker.service import ServiceStats

LABELS = ("model_name", "engine")
ENGINE = "0"

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
    *(1920, 7680),
)
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)

Read = Callable[[EngineStats], float]
Exported = tuple[str, str | None, str, Read]
"""A metric's name, vLLM's for the same if it has it, what it says, and how it is read."""
GAUGES: tuple[Exported, ...] = (
    ("tidemill_requests_running", "vllm:num_requests_running", "Requests in the running batch.",
     lambda stats: stats.num_running),
    ("tidemill_requests_waiting", "vllm:num_requests_waiting", "Requests waiting in the engine.",
     lambda stats: stats.num_waiting),
    ("tidemill_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.",
     lambda stats: stats.kv_usage),
    ("tidemill_swap_usage_ratio", None, "Share of the swap space that preempted requests will need again.",
     lambda stats: stats.swap_usage),
)  # fmt: skip
COUNTERS: tuple[Exported, ...] = (
    ("tidemill_preemptions", "vllm:num_preemptions", "Times a running request lost its KV blocks.",
     lambda stats: stats.num_preemptions),
    ("tidemill_prompt_tokens", "vllm:prompt_tokens", "Prompt tokens of requests that got a first token.",
     lambda stats: stats.prompt_tokens),
    ("tidemill_generation_tokens", "vllm:generation_tokens", "Tokens generated.",
     lambda stats: stats.generation_tokens),
    ("tidemill_prefix_cache_queries", "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.",
     lambda stats: stats.prefix_query_tokens),
    ("tidemill_prefix_cache_hits", "vllm:prefix_cache_hits", "Tokens found in the prefix cache.",
     lambda stats: stats.prefix_hit_tokens - stats.swap_hit_tokens),
    ("tidemill_recomputed_tokens", "vllm:prompt_tokens_recomputed",
     "Tokens computed once more after a preemption.",
     lambda stats: stats.recomputed_tokens),
)  # fmt: skip
SWAP_CACHE_COUNTERS: tuple[Exported, ...] = (
    ("tidemill_swap_cache_queries", "vllm:external_prefix_cache_queries",
     "Tokens not found in the prefix cache, and looked up in the swap space.",
     lambda stats: stats.prefix_query_tokens - stats.prefix_hit_tokens + stats.swap_hit_tokens),
    ("tidemill_swap_cache_hits", "vllm:external_prefix_cache_hits", "Tokens found in the swap space.",
     lambda stats: stats.swap_hit_tokens),
)  # fmt: skip
"""They stay 0 in a worker without swap space: what the prefix cache lacks is looked up nowhere else."""
LABELLED_COUNTERS: tuple[tuple[str, str, str, Mapping[str, Read]], ...] = (
    ("tidemill_preemptions_by_kind", "Preemptions by what restores the request: its blocks, or computing.",
     "kind",
     {"swap": lambda stats: stats.num_swap_preemptions,
      "recompute": lambda stats: stats.num_preemptions - stats.num_swap_preemptions}),
    ("tidemill_swapped_blocks", "KV blocks copied to the swap space (out) and back (in).",
     "direction",
     {"out": lambda stats: stats.blocks_swapped_out, "in": lambda stats: stats.blocks_swapped_in}),
)  # fmt: skip
SERVICE_GAUGES: tuple[tuple[str, str, Callable[[ServiceStats], float]], ...] = (
    ("tidemill_intake_paused",
     "1 while no jobs are claimed because Redis refuses, too much waits for it or for the engine,"
     " or one job has to run alone; else 0.",
     lambda stats: stats.intake_is_paused),
    ("tidemill_results_waiting", "Jobs that have ended and whose result is not recorded yet.",
     lambda stats: stats.num_unrecorded),
    ("tidemill_results_waiting_bytes", "What these results take, about.",
     lambda stats: stats.unrecorded_bytes),
)  # fmt: skip
HISTOGRAMS: dict[str, tuple[str, str, str, tuple[float, ...]]] = {
    "ttft": ("tidemill_time_to_first_token_seconds", "vllm:time_to_first_token_seconds",
             "From the claim to the first token of a generation.", TTFT_BUCKETS),
    "inter_token": ("tidemill_inter_token_latency_seconds", "vllm:inter_token_latency_seconds",
                    "Between two tokens of a generation.", TOKEN_BUCKETS),
    "e2e": ("tidemill_request_latency_seconds", "vllm:e2e_request_latency_seconds",
            "From the claim to the last token.", REQUEST_BUCKETS),
    "queue": ("tidemill_request_queue_time_seconds", "vllm:request_queue_time_seconds",
              "From the claim to the first scheduled token.", REQUEST_BUCKETS),
    "prefill": ("tidemill_request_prefill_time_seconds", "vllm:request_prefill_time_seconds",
                "From the first scheduled token to the first generated one.", REQUEST_BUCKETS),
    "decode": ("tidemill_request_decode_time_seconds", "vllm:request_decode_time_seconds",
               "From the first generated token to the last.", REQUEST_BUCKETS),
    "inference": ("tidemill_request_inference_time_seconds", "vllm:request_inference_time_seconds",
                  "From the first scheduled token to the last generated one.", REQUEST_BUCKETS),
    "n": ("tidemill_request_params_n", "vllm:request_params_n",
          "Generations that a request asked for.", N_BUCKETS),
}  # fmt: skip
FINISHED = ("tidemill_requests_finished", "vllm:request_success",
            "Generations of recorded jobs by how they ended: stop, length, abort or error.")  # fmt: skip
REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.EXPIRED: "abort",
    FinishReason.ERROR: "error",
}
"""vLLM's words."""


class EngineCollector(Collector):
    """Reads the engine's own gauges and counters when they are asked for."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats], *, has_swap_space: bool) -> None:
        self._labels = (model_name, ENGINE)
        self._stats = stats
        self._has_swap_space = has_swap_space

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for tidemill, vllm, text, value in GAUGES:
            for name in filter(None, (tidemill, vllm)):
                gauge = GaugeMetricFamily(name, text, labels=LABELS)
                gauge.add_metric(self._labels, value(stats))
                yield gauge
        for tidemill, vllm, text, value in COUNTERS:
            yield from self._counters(tidemill, vllm, text, value(stats))
        for tidemill, vllm, text, value in SWAP_CACHE_COUNTERS:
            yield from self._counters(tidemill, vllm, text, value(stats) if self._has_swap_space else 0.0)
        for name, text, label, values in LABELLED_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=(*LABELS, label))
            for kind, value in values.items():
                counter.add_metric((*self._labels, kind), value(stats))
            yield counter

    def _counters(self, tidemill: str, vllm: str | None, text: str, value: float) -> Iterator[Metric]:
        for name in filter(None, (tidemill, vllm)):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter


class ServiceCollector(Collector):
    """Reads the service's gauges when they are asked for."""

    def __init__(self, model_name: str, stats: Callable[[], ServiceStats]) -> None:
        self._labels = (model_name, ENGINE)
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in SERVICE_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value(stats))
            yield gauge


class Metrics:
    """The service's observer; its methods may be called from any thread."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model_name = model_name
        self._labels = (model_name, ENGINE)
        self._clock = clock
        self.registry = CollectorRegistry()
        self._histograms = {key: self._histogram(*row) for key, row in HISTOGRAMS.items()}
        tidemill, vllm, text = FINISHED
        self._finished = [
            Counter(name, text, (*LABELS, "finished_reason"), registry=self.registry)
            for name in (tidemill, vllm)
        ]
        self._queued = Histogram(
            "tidemill_job_queue_time_seconds",
            "From submission to the claim, by Redis's clock.",
            LABELS,
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        ).labels(*self._labels)
        self._claimed = Counter(
            "tidemill_jobs_claimed", "Jobs claimed or reclaimed.", LABELS, registry=self.registry
        ).labels(*self._labels)
        self._failures = Counter(
            "tidemill_redis_failures", "Calls that Redis did not answer, or refused.",
            (*LABELS, "reason"), registry=self.registry,
        )  # fmt: skip
        for reason in dict.fromkeys(REASONS.values()):  # so that a rate starts from 0
            for counter in self._finished:
                counter.labels(*self._labels, reason)
        for failure in RedisFailure:
            self._failures.labels(*self._labels, failure)

    def watch(self, stats: Callable[[], EngineStats], *, has_swap_space: bool) -> None:
        """Export the engine's stats too."""
        self.registry.register(EngineCollector(self._model_name, stats, has_swap_space=has_swap_space))

    def watch_service(self, stats: Callable[[], ServiceStats]) -> None:
        """Export what waits in the service too."""
        self.registry.register(ServiceCollector(self._model_name, stats))

    def exposition(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def claimed(self, jobs: Sequence[HeldJob]) -> None:
        """Jobs were claimed."""
        self._claimed.inc(len(jobs))
        for job in jobs:
            self._queued.observe(job.queued)

    def progressed(self, held: HeldJob, output: StepOutput) -> None:
        """A step brought this to a job."""
        now = self._clock()
        if output.token_ids:
            choice = held.choice(output.choice)
            if choice.last_token is None:
                self._observe("ttft", now - held.claimed)
            else:
                self._observe("inter_token", now - choice.last_token)
            choice.last_token = now
        if output.marks is not None and output.error is None:
            self._observe_stages(held, output.marks)

    def recorded(self, held: HeldJob, result: Result) -> None:
        """The result of a job was recorded."""
        self._observe("n", len(result.choices))
        for choice in result.choices:
            reason = REASONS[choice.finish_reason or FinishReason.ERROR]
            for counter in self._finished:
                counter.labels(*self._labels, reason).inc()

    def unreachable(self, error: QueueUnavailable) -> None:
        """Redis did not do what it was asked."""
        self._failures.labels(*self._labels, failure_of(error)).inc()

    def _observe_stages(self, held: HeldJob, marks: Marks) -> None:
        self._observe("queue", marks.scheduled - held.claimed)
        self._observe("prefill", marks.first_token - marks.scheduled)
        self._observe("decode", marks.finished - marks.first_token)
        self._observe("inference", marks.finished - marks.scheduled)
        self._observe("e2e", marks.finished - held.claimed)

    def _observe(self, key: str, value: float) -> None:
        for histogram in self._histograms[key]:
            histogram.observe(value)

    def _histogram(self, tidemill: str, vllm: str, text: str, buckets: tuple[float, ...]) -> list[Histogram]:
        return [
            Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(*self._labels)
            for name in (tidemill, vllm)
        ]
