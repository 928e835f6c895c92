"""The simulator: every request ends with its tokens, on a clock that never goes back."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shape import load_shape
from pressure import draw_pressure, sweep, sweep_figures
from request_trace import SharedPrefix, TracedRequest, draw_trace
from roofline import ACCELERATORS, Efficiency, Roofline
from simulate import OF_A_TRACE, main, make_parser
from simulation_report import figures_of, tokens_per_second
from simulator import MEASURED_TOKENS, Simulation, Simulator, measured_chunk
from workload import LogNormal

from tidemill_scheduler import PreemptionMode, SchedulerConfig
from tidemill_worker.model import runner

ROOFLINE = Roofline(load_shape("qwen2.5-0.5b"), ACCELERATORS["h100"], Efficiency())


def make_config(**changes: Any) -> SchedulerConfig:
    sizes = {"num_blocks": 500, "max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    return SchedulerConfig(**(sizes | changes))


def make_trace(count: int = 40, **changes: Any) -> list[TracedRequest]:
    lengths = LogNormal(60.0, 1.0, (1, 600))
    return draw_trace(count, **({"prompts": lengths, "outputs": lengths} | changes))


def make_request(prompt: int = 64, output: int = 8, **changes: Any) -> TracedRequest:
    fields = {"arrival": 0.0, "prompt_tokens": prompt, "output_tokens": output}
    return TracedRequest(**(fields | changes))


def run(trace: list[TracedRequest], **changes: Any) -> Simulation:
    return Simulator(make_config(**changes), ROOFLINE, trace).run()


def assert_complete(simulation: Simulation) -> None:
    assert all(response.num_tokens == response.request.output_tokens for response in simulation.responses)
    assert not simulation.scheduler.has_unfinished
    simulation.scheduler.check_integrity()


@pytest.mark.parametrize("arrivals", ["burst", "poisson"])
@pytest.mark.parametrize("num_swap_blocks", [0, 500])
def test_every_request_ends_with_its_tokens(arrivals: str, num_swap_blocks: int) -> None:
    trace = make_trace(arrivals=arrivals, rate=50.0)
    simulation = run(trace, num_blocks=80, num_swap_blocks=num_swap_blocks)
    assert [response.request for response in simulation.responses] == trace
    assert simulation.scheduler.counters.num_preemptions > 0
    assert_complete(simulation)


def test_the_clock_never_goes_back() -> None:
    simulation = run(make_trace(arrivals="poisson", rate=50.0))
    assert all(earlier < later for earlier, later in pairwise(simulation.history.times))
    assert min(simulation.gaps) > 0.0
    assert all(
        response.request.arrival < response.first_token <= response.last_token
        for response in simulation.responses
    )


def test_a_lone_request_takes_the_sum_of_its_steps() -> None:
    simulation = run([make_request(64, 3, arrival=5.0)])
    (response,) = simulation.responses
    assert len(simulation.history.times) == 3
    assert response.response_time == pytest.approx(sum(simulation.history.seconds))
    assert sum(simulation.gaps) == pytest.approx(response.last_token - response.first_token)
    assert simulation.num_computed_tokens == 64 + 2


def test_idle_time_is_skipped_and_does_not_count() -> None:
    alone, apart = run([make_request()]), run([make_request(), make_request(65, arrival=1000.0)])
    assert 1000.0 < apart.responses[1].last_token < 1001.0
    assert sum(apart.history.seconds) < 1.0
    assert figures_of(apart)["kv_usage_mean"] == pytest.approx(figures_of(alone)["kv_usage_mean"], rel=0.05)


def test_the_same_trace_gives_the_same_figures() -> None:
    trace = make_trace(arrivals="poisson", rate=50.0)
    first, second = (run(trace, num_blocks=80, num_swap_blocks=80) for _ in range(2))
    assert figures_of(first) == figures_of(second)
    assert first.history == second.history


def test_an_empty_trace_is_no_error() -> None:
    figures = figures_of(run([]))
    assert figures["requests"] == figures["steps"] == figures["tokens_per_s"] == 0
    assert not any(name.startswith(("ttft", "response", "inter_token")) for name in figures)


def test_what_never_fits_is_reported_and_the_rest_goes_on() -> None:
    giant = make_request(64, 900)
    simulation = run([make_request(), giant, make_request()], num_blocks=20)
    ((refused, error),) = simulation.refused
    assert refused is giant
    assert "964" in str(error)
    assert len(simulation.responses) == 2
    assert_complete(simulation)


def test_different_requests_share_nothing_by_accident() -> None:
    simulation = run([make_request(320) for _ in range(10)], max_num_seqs=1)
    assert simulation.scheduler.counters.num_prefix_hit_tokens == 0
    assert simulation.num_computed_tokens == 10 * (320 + 7)


@pytest.mark.parametrize(("tenants", "hits"), [(["", ""], 160), (["a", "b"], 0)])
def test_a_group_shares_its_prefix_within_a_tenant(tenants: list[str], hits: int) -> None:
    prefix = SharedPrefix(group="system prompt", tokens=160)
    trace = [make_request(320, prefix=prefix, tenant=tenant) for tenant in tenants]
    assert run(trace, max_num_seqs=1).scheduler.counters.num_prefix_hit_tokens == hits


def test_requests_of_higher_priority_go_first() -> None:
    trace = [make_request(priority=1), make_request(priority=1), make_request(priority=0)]
    low, _, high = run(trace, max_num_seqs=1).responses
    assert high.last_token < low.first_token


def test_block_sizes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 32 in the scheduler, 16 in the cost model"):
        run([], block_size=32)


@pytest.mark.parametrize(
    ("changes", "context", "chunk"),
    [
        ({"max_num_batched_tokens": 512}, 4096, 512),
        ({"max_num_batched_tokens": 8192}, 4096, 2048),
        ({"max_num_batched_tokens": 8192}, 1000, 1000),
        ({"max_num_batched_tokens": 8192, "num_blocks": 10}, 4096, 160),
    ],
)
def test_restoring_costs_what_a_worker_would_measure(
    changes: dict[str, Any], context: int, chunk: int
) -> None:
    assert measured_chunk(make_config(**changes), context) == chunk


def test_the_scheduler_is_told_these_costs() -> None:
    costs = run([], max_num_batched_tokens=8192).scheduler.costs
    assert costs == ROOFLINE.restore_costs(MEASURED_TOKENS)
    assert runner.MEASURED_TOKENS == MEASURED_TOKENS


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.builds(
            make_request,
            st.integers(1, 300),
            st.integers(1, 60),
            arrival=st.floats(0.0, 1.0),
            priority=st.integers(0, 2),
        ),
        min_size=1,
        max_size=25,
    ),
    num_blocks=st.integers(23, 120),
    num_swap_blocks=st.integers(0, 200),
    max_num_seqs=st.integers(1, 32),
    gpu=st.sampled_from(sorted(ACCELERATORS)),
)
def test_no_simulation_beats_the_roofline(
    requests: list[TracedRequest], num_blocks: int, num_swap_blocks: int, max_num_seqs: int, gpu: str
) -> None:
    """A step generates no more than a token a row, for which it reads all weights and multiplies by them."""
    roofline = Roofline(load_shape("qwen2.5-0.5b"), ACCELERATORS[gpu], Efficiency())
    config = make_config(num_blocks=num_blocks, num_swap_blocks=num_swap_blocks, max_num_seqs=max_num_seqs)
    trace = sorted(requests, key=lambda request: request.arrival)
    simulation = Simulator(config, roofline, trace).run()
    assert_complete(simulation)
    model, accelerator = roofline.model, roofline.accelerator
    weights = model.dense_parameters + model.head_parameters
    by_reading = max_num_seqs * accelerator.bandwidth / (2 * weights)
    by_computing = accelerator.rate / (2 * weights)
    assert tokens_per_second(simulation) < min(by_reading, by_computing)
    needed = sum(request.prompt_tokens + request.output_tokens - 1 for request in trace)
    assert simulation.num_computed_tokens - simulation.scheduler.counters.num_recomputed_tokens == needed
    assert sum(simulation.history.seconds) >= 2 * model.dense_parameters * needed / accelerator.rate


def test_the_sweep_is_one_of_memory_pressure() -> None:
    config = make_config(max_num_seqs=512, max_num_batched_tokens=2048, num_swap_blocks=8192)
    result = sweep(config, ROOFLINE, draw_pressure(seed=0), pools=[800])
    assert result.peak_blocks == pytest.approx(4200, rel=0.03)
    recompute, swap = result.points
    assert (recompute.mode, swap.mode) == (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP)
    assert recompute.num_swapped == recompute.num_blocks_swapped_in == 0
    assert 0 < swap.num_swapped <= swap.num_preemptions
    assert swap.recomputed_share < recompute.recomputed_share / 2
    assert max(recompute.tokens_ratio, swap.tokens_ratio) < 1.0
    assert sweep_figures(result)["recomputed_share_swap_800"] == swap.recomputed_share


def test_the_command_writes_figures_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "svg")}
    main(["--requests", "20", "--json", str(paths["json"]), "--plot", str(paths["svg"])])
    document = json.loads(paths["json"].read_text())
    assert document["figures"]["requests"] == 20
    assert document["settings"]["gpu"] == "h100"
    assert paths["svg"].read_text().lstrip().startswith("<?xml")
    assert "tokens_per_s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere"], "model nowhere"),
        (["--num-blocks", "0"], "num_blocks is 0"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--swap-space", "-1"], "swap_space is -1.0"),
        (["--block-size", "0"], "block_size is 0"),
        (["--prompt-most", "2000000"], "2000000, must be 1 to 1048576"),
        (["--sweep", "--max-num-batched-tokens", "100"], "max_num_batched_tokens is 100"),
    ],
)
def test_a_wrong_command_ends_with_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", OF_A_TRACE)
def test_the_sweep_refuses_what_it_would_ignore(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Given an option of a trace, even with the value that it has anyway, then it is named."""
    flag, default = f"--{name.replace('_', '-')}", make_parser().get_default(name)
    words = [] if default is False else [str(default or 1)]
    with pytest.raises(SystemExit):
        main(["--sweep", flag, *words])
    assert capsys.readouterr().err.endswith(f"--sweep makes no use of {flag}\n")
