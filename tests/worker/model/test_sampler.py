"""Choosing tokens: the right distribution, the right truncation, and noise that belongs to the job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from tidemill.jobs import SamplingParams
from tidemill_worker.model.sampler import INVALID_TOKEN, sample, truncate


@dataclass
class Drawn:
    """A generation that has `num_output` tokens and draws its next one."""

    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 7
    num_output: int = 0
    num_prompt_tokens: int = 3
    token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = [0] * (self.num_prompt_tokens + self.num_output)


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_greedy_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    greedy = Drawn(SamplingParams(temperature=0.0))
    assert sample(logits, [greedy, greedy]) == [1, 0]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 5), []) == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_usable_logits_fails_alone(bad: float, temperature: float) -> None:
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 90.0, 0.0]])
    row = Drawn(SamplingParams(temperature=temperature))
    assert sample(logits, [row, row]) == [INVALID_TOKEN, 1]


def test_draws_follow_the_distribution() -> None:
    # Given four tokens, when 8,000 positions are drawn, then frequencies are probabilities.
    probabilities = (0.1, 0.2, 0.3, 0.4)
    count = 8000
    rows = [Drawn(num_output=index) for index in range(count)]
    drawn = Counter(sample(logits_of(*probabilities).repeat(count, 1), rows))
    for token, probability in enumerate(probabilities):
        # Five standard deviations of a binomial; the seed is fixed, so this never flickers.
        assert abs(drawn[token] / count - probability) < 5 * (probability * (1 - probability) / count) ** 0.5


def test_temperature_sharpens() -> None:
    rows = [Drawn(SamplingParams(temperature=0.25), num_output=index) for index in range(2000)]
    drawn = Counter(sample(logits_of(0.4, 0.6).repeat(2000, 1), rows))
    expected = 0.6**4 / (0.6**4 + 0.4**4)
    assert drawn[1] / 2000 == pytest.approx(expected, abs=0.04)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 1000)
    rows = [Drawn(seed=seed, num_output=seed) for seed in range(5)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(5)]
    assert sample(logits.flip(0), rows[::-1]) == together[::-1]


def test_another_seed_or_position_draws_anew() -> None:
    flat = torch.zeros(1, 10_000)
    by_seed = {sample(flat, [Drawn(seed=seed)])[0] for seed in range(50)}
    by_position = {sample(flat, [Drawn(num_output=position)])[0] for position in range(50)}
    assert len(by_seed) > 45
    assert len(by_position) > 45


def test_the_largest_seed_is_as_good_as_any() -> None:
    assert 0 <= sample(torch.zeros(1, 100), [Drawn(seed=2**63 - 1)])[0] < 100


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [3, 1]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_k": -1}, [0, 1, 2, 3]),
        ({"top_p": 0.4}, [3]),
        ({"top_p": 0.41}, [3, 1]),
        ({"top_p": 1e-9}, [3]),
        ({"top_p": 0.95}, [3, 1, 2, 0]),
        # Of the two kept, token 3 holds 0.4 / 0.7 = 0.57 of the mass.
        ({"top_k": 2, "top_p": 0.57}, [3]),
        ({"top_k": 2, "top_p": 0.58}, [3, 1]),
    ],
)
def test_truncation(params: dict[str, float], kept: list[int]) -> None:
    logits, tokens = truncate(logits_of(0.1, 0.3, 0.2, 0.4), SamplingParams.model_validate(params))
    assert tokens.tolist() == kept
    assert logits.tolist() == logits_of(0.1, 0.3, 0.2, 0.4)[tokens].tolist()


def test_what_is_cut_off_is_never_drawn() -> None:
    rows = [Drawn(SamplingParams(top_k=2), num_output=index) for index in range(500)]
    assert set(sample(logits_of(0.25, 0.2, 0.3, 0.25 - 1e-3).repeat(500, 1), rows)) == {0, 2}
