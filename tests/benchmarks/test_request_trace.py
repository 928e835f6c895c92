"""Traces: drawn as said and the same for a seed, read with errors that name line and field."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from request_trace import TracedRequest, draw_trace, read_trace
from workload import LogNormal


def make_lengths(**changes: Any) -> LogNormal:
    fields: dict[str, Any] = {"median": 100.0, "sigma": 1.0, "bounds": (4, 1000)}
    return LogNormal(**(fields | changes))


def draw(count: int = 500, **changes: Any) -> list[TracedRequest]:
    return draw_trace(count, **({"prompts": make_lengths(), "outputs": make_lengths(median=20.0)} | changes))


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_lengths_are_heavy_tailed_within_their_bounds() -> None:
    prompts = [request.prompt_tokens for request in draw()]
    assert 4 <= min(prompts) < max(prompts) <= 1000
    assert 80 < median(prompts) < 125
    assert mean(prompts) > 1.3 * median(prompts)


def test_a_burst_comes_at_once() -> None:
    assert {request.arrival for request in draw()} == {0.0}


def test_poisson_arrivals_have_the_rate_in_order() -> None:
    arrivals = [request.arrival for request in draw(2000, arrivals="poisson", rate=10.0)]
    assert all(earlier < later for earlier, later in pairwise(arrivals))
    assert arrivals[-1] == pytest.approx(2000 / 10.0, rel=0.1)


def test_the_seed_decides() -> None:
    assert draw(20) == draw(20)
    assert draw(20) != draw(20, seed=1)


def test_a_file_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"arrival": 2, "prompt_tokens": 5, "output_tokens": 3}',
        "",
        '{"arrival": 0.5, "prompt_tokens": 9, "output_tokens": 1, "priority": 0, "tenant": "a",'
        ' "prefix": {"group": "g", "tokens": 9}}',
    )
    early, late = read_trace(path)
    assert (early.arrival, early.priority, early.tenant) == (0.5, 0, "a")
    assert early.prefix is not None
    assert (early.prefix.group, early.prefix.tokens) == ("g", 9)
    assert (late.arrival, late.prompt_tokens, late.output_tokens, late.priority) == (2.0, 5, 3, 1)


def test_an_empty_file_is_an_empty_trace(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, "")) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "request: Invalid JSON"),
        ('{"prompt_tokens": 5, "output_tokens": 3}', "arrival: Field required"),
        ('{"arrival": -1, "prompt_tokens": 5, "output_tokens": 3}', "arrival: .*greater than or equal to 0"),
        (
            '{"arrival": 1, "prompt_tokens": 0, "output_tokens": 3}',
            "prompt_tokens: .*greater than or equal to 1",
        ),
        ('{"arrival": 1, "prompt_tokens": 5, "output_tokens": 2.5}', "output_tokens: .*valid integer"),
        ('{"arrival": 1, "prompt_tokens": 5, "output_tokens": 3, "user": 1}', "user: Extra inputs"),
        (
            '{"arrival": 1, "prompt_tokens": 5, "output_tokens": 3, "prefix": {"group": 1, "tokens": 0}}',
            "prefix.tokens: ",
        ),
        (
            '{"arrival": 1, "prompt_tokens": 5, "output_tokens": 3, "prefix": {"group": 1, "tokens": 6}}',
            "prefix.tokens is 6, at most prompt_tokens, 5",
        ),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, '{"arrival": 1, "prompt_tokens": 5, "output_tokens": 3}', line)
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        read_trace(path)


@pytest.mark.parametrize(
    "changes", [{"median": 0.0}, {"sigma": -1.0}, {"bounds": (0, 1000)}, {"bounds": (2, 1)}]
)
def test_lengths_without_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_lengths(**changes)


def test_a_rate_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rate is 0\.0"):
        draw(rate=0.0)
