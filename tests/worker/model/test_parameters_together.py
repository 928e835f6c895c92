"""Every parameter in one crowd, through the engine: each job gets what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.worker.model.factories import Bench, load, make_request, make_tiny_llama, preempt_at_random
from tidemill.params import SamplingParams
from tidemill_scheduler import Scheduler
from tidemill_worker.request import Request

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 3},
    "plain": {},
    "cold": {"temperature": 0.3, "logprobs": 0},
    "truncated": {"top_p": 0.8, "top_k": 30, "min_p": 0.01},
    "penalized": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logprobs": 2,
    },
    "greedy, penalized": {"temperature": 0.0, "repetition_penalty": 2.0, "frequency_penalty": 1.0},
    "biased": {"logit_bias": {5: 4.0, 6: -100.0}, "stop_token_ids": [5], "min_tokens": 8},
    "several": {"n": 3, "temperature": 1.3, "logprobs": 1},
    "several, prompt too": {"n": 2, "prompt_logprobs": 2, "logprobs": 4, "top_p": 0.9},
    "greedy, prompt too": {"temperature": 0.0, "prompt_logprobs": 0},
}
BAD_WORDS = {"plain": [[7], [8, 9]], "penalized": [[n, m] for n in range(60, 90) for m in range(0, 128, 2)]}

Answers = dict[tuple[str, int], tuple[Any, ...]]
"""By job and choice: tokens, their logprobs, and the prompt's."""


def make_requests() -> list[Request]:
    dice = random.Random(0)
    requests = []
    for number, (name, settings) in enumerate(SETTINGS.items()):
        prompt = [dice.randrange(2, 128) for _ in range(5 + 9 * number)]
        params = SamplingParams.model_validate({"max_tokens": 14, **settings})
        request = make_request(name, prompt, params)
        request.bad_words = BAD_WORDS.get(name, ())
        requests.append(request)
    return requests


def answers(
    bench: Bench, requests: list[Request], between_steps: Callable[[Scheduler], None] = lambda _: None
) -> Answers:
    for request in requests:
        bench.engine.add(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    logprobs: dict[tuple[str, int], list[Any]] = {}
    prompts: dict[str, Any] = {}
    while bench.engine.has_unfinished:
        for output in bench.engine.step():
            assert output.error is None
            key = output.request_id, output.choice
            tokens.setdefault(key, []).extend(output.token_ids)
            logprobs.setdefault(key, []).extend(output.logprobs)
            if output.prompt_logprobs is not None:
                prompts[output.request_id] = output.prompt_logprobs
        bench.engine.scheduler.check_integrity()
        between_steps(bench.engine.scheduler)
    return {key: (tokens[key], logprobs[key], prompts.get(key[0])) for key in tokens}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("llama"))
    return load(folder)


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> Answers:
    found: Answers = {}
    for request in make_requests():
        found |= answers(Bench(model), [request])
    return found


def test_each_alone_got_what_it_asked_for(alone: Answers) -> None:
    assert len(alone) == len(SETTINGS) + 2 + 1
    for request in make_requests():
        for choice in range(request.params.n):
            tokens, logprobs, prompt = alone[request.id, choice]
            assert len(tokens) == 14 or request.id == "biased"
            assert len(logprobs) == (0 if request.params.logprobs is None else len(tokens))
            assert [token.token_id for token in logprobs] in ([], tokens)
            if request.params.prompt_logprobs is not None:
                assert [token.token_id for token in prompt] == request.prompt_token_ids[1:]
    choices = [tuple(alone["several", choice][0]) for choice in range(3)]
    assert len(set(choices)) == 3
    assert 7 not in alone["plain", 0][0]
    assert len(alone["biased", 0][0]) >= 8
    assert 6 not in alone["biased", 0][0]


@pytest.mark.parametrize("budget", [24, 512])
def test_in_a_crowd_each_gets_what_it_gets_alone(model: PreTrainedModel, alone: Answers, budget: int) -> None:
    for requests in (make_requests(), make_requests()[::-1]):
        bench = Bench(model, max_num_batched_tokens=budget, max_num_seqs=16)
        assert answers(bench, requests) == alone


@pytest.mark.parametrize("caching", [True, False])
def test_after_preemptions_each_gets_what_it_gets_alone(
    model: PreTrainedModel, alone: Answers, caching: bool
) -> None:
    bench = Bench(model, max_num_batched_tokens=64, enable_prefix_caching=caching)
    assert answers(bench, make_requests(), preempt_at_random(1, 0.15)) == alone
    assert bench.engine.stats().num_preemptions > 10


def test_a_sampler_that_loses_its_notes_goes_on_as_before(model: PreTrainedModel, alone: Answers) -> None:
    bench = Bench(model)

    def forget(_: Scheduler) -> None:
        for generation in bench.engine._generations.values():
            generation.sampler_state = None

    assert answers(bench, make_requests(), forget) == alone
