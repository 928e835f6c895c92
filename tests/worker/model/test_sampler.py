"""Choosing tokens: what each parameter means, with values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.worker.model.sampling import Drawn, drawn, logits_of, sample, sample_full
from tidemill.params import SamplingParams
from tidemill_kernels.rank_tokens import LOWEST
from tidemill_worker.model.sampler import INVALID_TOKEN, Sampler
from tidemill_worker.model.sampling_row import SamplingRow

GREEDY = SamplingParams(temperature=0.0)


def greedy(**params: object) -> SamplingParams:
    return SamplingParams.model_validate({"temperature": 0.0, **params})


def reachable(logits: torch.Tensor, count: int = 400, **params: object) -> set[int]:
    """The tokens that are drawn in so many positions."""
    return set(sample(logits.repeat(count, 1), [drawn(index, **params) for index in range(count)]))


def test_greedy_takes_the_largest_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 5.0], [-0.0, 0.0, -1.0]])
    assert sample(logits, [Drawn(GREEDY)] * 3) == [1, 0, 0]


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = torch.tensor([[2.0, 2.0 + 1e-6, 1.0]])
    assert {sample(logits, [drawn(index, temperature=9e-6)])[0] for index in range(30)} == {1}


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 5), []) == []


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_usable_logits_fails_alone(bad: float, temperature: float) -> None:
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 90.0, 0.0]])
    row = drawn(temperature=temperature, logprobs=1)
    sampled = sample_full(logits, [row, row])
    assert sampled.tokens == [INVALID_TOKEN, 1]
    assert list(sampled.logprobs) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_single_tokens_may_be_impossible_but_not_all(temperature: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf], [-torch.inf] * 3])
    assert sample(logits, [drawn(temperature=temperature)] * 2) == [1, INVALID_TOKEN]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_forbidden_fails_alone(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    nothing = Drawn(params, allowed=())
    assert sample(torch.zeros(2, 5), [nothing, Drawn(params, allowed=[3])]) == [INVALID_TOKEN, 3]


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(3, 100)
    before = logits.clone()
    row = Drawn(
        SamplingParams(top_k=5, top_p=0.5, min_p=0.1, logit_bias={3: 5.0}, repetition_penalty=2.0),
        allowed=range(90),
        bad_words=[[4]],
    )
    sample(logits, [row, Drawn(), Drawn(GREEDY)])
    assert torch.equal(logits, before)


def test_a_draw_depends_on_seed_position_and_choice_only() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 1000)
    rows = [Drawn(seed=seed, output=[1] * seed, choice=seed % 2) for seed in range(5)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(5)]
    assert sample(logits.flip(0), rows[::-1]) == together[::-1]


def test_another_seed_position_or_choice_draws_anew() -> None:
    flat = torch.zeros(50, 10_000)
    assert len(set(sample(flat, [Drawn(seed=seed) for seed in range(50)]))) > 45
    assert len(set(sample(flat, [drawn(position) for position in range(50)]))) > 45
    assert len(set(sample(flat, [Drawn(choice=choice) for choice in range(50)]))) > 45


def test_the_largest_seed_is_as_good_as_any() -> None:
    assert 0 <= sample(torch.zeros(1, 100), [Drawn(seed=2**63 - 1)])[0] < 100


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {3, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_k": 2**70}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {3}),
        ({"top_p": 0.41}, {3, 1}),
        ({"top_p": 1e-9}, {3}),
        ({"top_p": 0.95}, {3, 1, 2, 0}),
        # Of the two kept, token 3 holds 0.4 / 0.7 = 0.571 of the mass.
        ({"top_k": 2, "top_p": 0.57}, {3}),
        ({"top_k": 2, "top_p": 0.573}, {3, 1}),
        ({"min_p": 0.51}, {3, 1}),
        ({"min_p": 0.49}, {3, 1, 2}),
        ({"min_p": 1.0}, {3}),
        # min_p leaves 0.4, 0.3 and 0.2; of these, token 3 is 0.444, with token 1 0.778.
        ({"min_p": 0.49, "top_p": 0.45}, {3, 1}),
        ({"min_p": 0.49, "top_p": 0.77}, {3, 1}),
        ({"min_p": 0.49, "top_p": 0.79}, {3, 1, 2}),
        # After the temperature, the likeliest have 0.4 ** 2 : 0.3 ** 2, or 1 : 0.5625.
        ({"min_p": 0.57, "temperature": 0.5}, {3}),
        ({"min_p": 0.55, "temperature": 0.5}, {3, 1}),
        ({"min_p": 0.7, "temperature": 2.0}, {3, 1, 2}),
    ],
)
def test_truncation(params: dict[str, float], kept: set[int]) -> None:
    assert reachable(logits_of(0.1, 0.3, 0.2, 0.4), **params) == kept


def test_logit_bias_is_added() -> None:
    # Token 9 of a vocabulary of four is nobody's.
    row = Drawn(greedy(logit_bias={0: 3.0, 2: -100.0, 9: 100.0, 2**70: 100.0}))
    assert sample(torch.tensor([[1.5, 4.0, 9.0, 4.4]]), [row]) == [0]
    assert sample(torch.tensor([[1.3, 4.0, 9.0, 4.4]]), [row]) == [3]


def test_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_negative() -> None:
    params = greedy(repetition_penalty=2.0)
    both_ways = Drawn(params, prompt=[1, 1], output=[2])
    # 4 becomes 2 for a token of the prompt and for one of the output; however often it stands there.
    assert sample(torch.tensor([[2.1, 4.0, 4.0, -1.0]]), [both_ways]) == [0]
    assert sample(torch.tensor([[1.9, 4.0, 3.0, -1.0]]), [both_ways]) == [1]
    # -1 becomes -2.
    assert sample(torch.tensor([[-1.9, -1.0, -1.0, -3.0]]), [both_ways]) == [0]
    assert sample(torch.tensor([[-2.1, -1.0, -1.0, -3.0]]), [both_ways]) == [1]


def test_presence_penalty_is_taken_once_from_what_the_output_holds() -> None:
    row = Drawn(greedy(presence_penalty=1.5), prompt=[0], output=[1, 1, 1])
    assert sample(torch.tensor([[2.0, 3.4, 0.0]]), [row]) == [0]
    assert sample(torch.tensor([[2.0, 3.6, 0.0]]), [row]) == [1]


def test_frequency_penalty_is_taken_for_each_time() -> None:
    row = Drawn(greedy(frequency_penalty=0.5), prompt=[0, 0], output=[1, 2, 1, 1])
    assert sample(torch.tensor([[2.0, 3.4, 2.4]]), [row]) == [0]
    assert sample(torch.tensor([[2.0, 3.6, 2.4]]), [row]) == [1]
    assert sample(torch.tensor([[2.0, 3.4, 2.6]]), [row]) == [2]


def test_negative_penalties_favour_what_was_said() -> None:
    row = Drawn(greedy(presence_penalty=-1.0, frequency_penalty=-0.5), output=[1, 1])
    assert sample(torch.tensor([[1.9, 0.0, 0.0]]), [row]) == [1]


def test_penalties_follow_the_output_as_it_grows_and_when_their_notes_are_lost() -> None:
    row = Drawn(greedy(frequency_penalty=1.0), prompt=[5])
    logits = torch.tensor([[3.0, 2.5, 2.2]])
    # 3.0, then 2.5 beats 2.0, 2.2 beats both, 2.0 beats 1.5 and 1.2, and so on.
    expected = [0, 1, 2, 0, 1, 2, 0, 1, 2]
    for token in expected:
        assert sample(logits, [row]) == [token]
        row.output.append(token)
    row.sampler_state = None
    assert sample(logits, [row]) == [0]


def test_bias_comes_before_the_repetition_penalty() -> None:
    # (-1 + 4) / 2 is 1.5; the other way round it would be -1 * 2 + 4, 2.
    row = Drawn(greedy(repetition_penalty=2.0, logit_bias={1: 4.0}), prompt=[9], output=[1])
    assert sample(torch.tensor([[1.6, -1.0]]), [row]) == [0]
    assert sample(torch.tensor([[1.4, -1.0]]), [row]) == [1]


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0, 4.0]])
    tokens = []
    for count in range(4):
        row = Drawn(greedy(min_tokens=2), output=[0] * count, end_tokens={2, 3, 2**40})
        tokens += sample(logits, [row])
    assert tokens == [1, 1, 2, 2]
    assert sample(logits, [Drawn(GREEDY, end_tokens={2, 3})]) == [2]


@pytest.mark.parametrize(
    ("output", "token"),
    [
        ([], 2),
        ([0], 2),
        ([0, 1], 3),  # 0 1 2 is a bad word
        ([2, 0, 1], 3),
        ([1], 2),
        ([1, 1], 2),
        ([3, 3], 3),  # 3 2 is one
        ([3, 0, 1], 3),
    ],
)
def test_a_bad_word_is_not_completed(output: list[int], token: int) -> None:
    row = Drawn(GREEDY, prompt=[3, 0, 1], output=output, bad_words=[[0, 1, 2], [3, 2], [1]])
    assert sample(torch.tensor([[0.0, 9.0, 8.0, 7.0]]), [row]) == [token]


def test_the_prompt_is_no_part_of_a_bad_word() -> None:
    row = Drawn(GREEDY, prompt=[0, 1], bad_words=[[1, 2]])
    assert sample(torch.tensor([[0.0, 1.0, 2.0]]), [row]) == [2]


def test_no_bias_brings_back_what_is_forbidden() -> None:
    params = greedy(logit_bias={0: 100.0, 1: 100.0, 2: 100.0}, min_tokens=1)
    row = Drawn(params, allowed=[1, 2, 3], bad_words=[[1]], end_tokens=[2])
    assert sample(torch.tensor([[5.0, 5.0, 5.0, 0.0]]), [row]) == [3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_all_that_a_grammar_allows_is_banned_the_grammar_wins(temperature: float) -> None:
    """Else a job that asks for one word and forbids it would fail, or the text break off in its middle."""
    params = SamplingParams(temperature=temperature, min_tokens=5)
    row = Drawn(params, allowed=[1, 2], bad_words=[[1]], end_tokens=[2])
    assert sample(torch.tensor([[9.0, 0.0, -40.0, 9.0]]), [row]) == [1]


def test_tokens_past_the_end_of_a_mask_are_not_allowed() -> None:
    logits = torch.arange(100.0).unsqueeze(0)
    assert sample(logits, [Drawn(GREEDY, allowed=range(100), mask_words=2)]) == [63]
    assert sample(logits, [Drawn(GREEDY, allowed=range(100), mask_words=9)]) == [99]
    assert sample(logits, [Drawn(GREEDY, allowed=[0, 31, 32], mask_words=9)]) == [32]


def test_logprobs_are_of_the_raw_logits() -> None:
    params = greedy(logprobs=2, logit_bias={0: 50.0}, repetition_penalty=1.5)
    sampled = sample_full(logits_of(0.1, 0.2, 0.3, 0.4).unsqueeze(0), [Drawn(params, output=[0])])
    assert sampled.tokens == [0]
    token = sampled.logprobs[0]
    assert (token.token_id, token.rank) == (0, 4)
    assert token.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token_id for token_id, _ in token.top] == [3, 2]
    assert [logprob for _, logprob in token.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)


def test_each_row_reports_as_many_likeliest_tokens_as_it_asks_for() -> None:
    rows = [drawn(logprobs=count) for count in (None, 0, 20, 3)]
    logprobs = sample_full(torch.zeros(4, 6), rows).logprobs
    assert {row: [token for token, _ in ranked.top] for row, ranked in logprobs.items()} == {
        1: [],
        2: [0, 1, 2, 3, 4, 5],
        3: [0, 1, 2],
    }
    assert all(ranked.rank == 1 for ranked in logprobs.values())


def test_the_logprob_of_an_impossible_token_is_finite() -> None:
    sampled = sample_full(torch.tensor([[0.0, -torch.inf]]), [drawn(logprobs=2)])
    assert sampled.logprobs[0].top == ((0, 0.0), (1, LOWEST))
    assert math.isfinite(LOWEST)


def test_far_logits_are_fetched_only_where_a_maximum_does_not_settle_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 300)
    logits[4, 7] = torch.nan
    generations = [
        Drawn(GREEDY),
        drawn(top_p=0.9),
        Drawn(greedy(logit_bias={5: 9.0})),
        Drawn(greedy(logprobs=1)),
        Drawn(GREEDY),
        Drawn(GREEDY),
    ]
    expected = sample_full(logits, generations)
    sampler, fetched = Sampler(), []
    choose = sampler._choose
    monkeypatch.setattr(sampler, "_choose", lambda x, rows: fetched.append(x) or choose(x, rows))
    rows = np.concatenate([SamplingRow.of(generation).advance(generation) for generation in generations])
    assert sampler._sample_fetching(logits, rows, generations) == expected
    assert expected.tokens[4] == INVALID_TOKEN
    assert torch.equal(torch.cat(fetched), logits[1:4])
    assert sampler._sample_fetching(logits[:1], rows[:1], generations[:1]).tokens == expected.tokens[:1]
    assert len(fetched) == 1
