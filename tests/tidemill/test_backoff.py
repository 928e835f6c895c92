"""Pauses between tries grow up to a limit, and no two clients make the same ones."""

from __future__ import annotations

from itertools import islice

from tidemill.backoff import pauses


def test_pauses_double_up_to_the_longest_and_stay_near_their_means() -> None:
    means = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    for _ in range(100):
        for pause, mean in zip(islice(pauses(0.1, 1.0), 7), means, strict=True):
            assert 0.5 * mean <= pause <= 1.5 * mean


def test_a_thousand_clients_that_begin_at_one_moment_come_back_over_all_of_the_pause() -> None:
    """Given clients cut off together, when each has paused, no tenth of the span sees a fifth of them."""
    first = [next(pauses(0.1, 1.0)) for _ in range(1000)]
    tenths = [int((pause - 0.05) / 0.01) for pause in first]
    assert max(tenths.count(tenth) for tenth in range(10)) < 200
