"""Many draws are distributed as the parameters say: chi-square, with seeds that never change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.worker.model.sampling import Drawn, reference_truncation, sample
from tidemill.params import SamplingParams

DRAWS = 6000
LOGITS = np.log(np.array([0.02, 0.3, 0.05, 0.13, 0.25, 0.1, 0.07, 0.08]))


def chi_square(drawn: list[int], probabilities: NDArray[np.float64]) -> tuple[float, int]:
    """The statistic, and its degrees of freedom; no impossible token may be among `drawn`."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = len(drawn) * probabilities[possible]
    return float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1


def probabilities(params: SamplingParams) -> NDArray[np.float64]:
    x = reference_truncation(LOGITS / params.temperature, params)
    weights: NDArray[np.float64] = np.exp(x - x.max())
    return weights / weights.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_p": 0.85},
        {"min_p": 0.2},
        {"top_k": 4},
        {"temperature": 0.7, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["positions", "seeds", "choices and positions"])
def test_draws_follow_the_distribution(settings: dict[str, float], over: str) -> None:
    params = SamplingParams.model_validate(settings)
    if over == "positions":
        rows = [Drawn(params, output=[0] * index) for index in range(DRAWS)]
    elif over == "seeds":
        rows = [Drawn(params, seed=seed) for seed in range(DRAWS)]
    else:
        rows = [Drawn(params, choice=i % 64, output=[0] * (i // 64)) for i in range(DRAWS)]
    drawn = sample(torch.tensor(LOGITS, dtype=torch.float32).repeat(DRAWS, 1), rows)
    statistic, degrees = chi_square(drawn, probabilities(params))
    # Mean `degrees`, standard deviation sqrt(2 degrees).
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def test_the_statistic_sees_a_slightly_wrong_distribution() -> None:
    rows = [Drawn(seed=seed) for seed in range(DRAWS)]
    drawn = sample(torch.tensor(LOGITS, dtype=torch.float32).repeat(DRAWS, 1), rows)
    statistic, degrees = chi_square(drawn, probabilities(SamplingParams(temperature=1.15)))
    assert statistic > degrees + 4 * (2 * degrees) ** 0.5


def test_a_large_vocabulary_is_drawn_from_evenly() -> None:
    # 40,000 equal tokens in 10 groups of neighbours, so that no part of the search is left out.
    drawn = sample(torch.zeros(400, 40_000), [Drawn(seed=seed) for seed in range(400)])
    groups = [token // 4000 for token in drawn]
    statistic, degrees = chi_square(groups, np.full(10, 0.1))
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5
