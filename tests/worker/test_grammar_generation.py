"""Grammars in the engine: with every sampling parameter, preempted, resumed and beside other jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest
from transformers import PreTrainedModel

from tests.worker.grammar_texts import SCHEMAS, make_compiler, make_tiny, outputs
from tests.worker.model.factories import Bench, load, make_tiny_llama
from tidemill.jobs import FinishReason
from tidemill.params import SamplingParams
from tidemill_worker.grammar import GrammarCompiler
from tidemill_worker.request import OpenChoice, Request

END = 0
TOKENIZER = make_tiny()
PROMPT = [60, 61, 62, 63]
LETTERS = r"[a-f]{2,6}(, [a-f]{2,6}){0,4}"
ASKED: dict[str, dict[str, Any]] = {
    "person": {"json": SCHEMAS["person"]},
    "shape": {"json": SCHEMAS["one of two shapes"]},
    "letters": {"regex": LETTERS},
    "choice": {"choice": ["the tide", "the mill", "the tide turns"]},
}
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 5.0},
    "truncated": {"top_k": 3, "top_p": 0.7, "min_p": 0.05},
    "penalised": {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    "biased towards the end": {"logit_bias": {END: 100.0, 70: -100.0}},
    "without some words": {"bad_words": ["turns", "sea"]},
    "at least 40 tokens": {"min_tokens": 40},
    "past the end": {"ignore_eos": True},
    "all at once": {
        "min_tokens": 3, "top_p": 0.9, "frequency_penalty": 1.0, "logit_bias": {END: 3.0}, "ignore_eos": True,
        "logprobs": 2,
    },
}  # fmt: skip


@dataclass
class Written:
    """One choice of one request."""

    token_ids: list[int]
    text: str = ""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Run:
    """What an engine made of its requests, by request and choice."""

    choices: dict[tuple[str, int], Written]
    num_preemptions: int

    @property
    def token_ids(self) -> dict[tuple[str, int], list[int]]:
        return {key: choice.token_ids for key, choice in self.choices.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=TOKENIZER.vocab_size)
    return load(folder)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = make_compiler(TOKENIZER, end_of_text={END})
    yield compiler
    compiler.close()


def request(
    compiler: GrammarCompiler,
    name: str,
    changes: Mapping[str, Any],
    resumed: Mapping[int, list[int]] | None = None,
) -> Request:
    params = SamplingParams.model_validate({"max_tokens": 200, **changes})
    compiled = compiler.compile(outputs(**ASKED[name]))
    choices = []
    for index in range(params.n):
        begun = (resumed or {}).get(index, [])
        text = TOKENIZER.output_text(params, PROMPT)
        for token in begun:
            text.append(token)
        choices.append(OpenChoice(index, text, compiled.start(begun), begun))
    words = TOKENIZER.bad_words(params.bad_words)
    return Request(name, PROMPT, params, seed=5, choices=choices, bad_words=words)


def generate(model: PreTrainedModel, *requests: Request, **bench: Any) -> Run:
    engine = Bench(model, **bench).engine
    engine.end_of_text = frozenset({END})
    written = {
        (one.id, choice.index): Written(list(choice.output_token_ids))
        for one in requests
        for choice in one.choices
    }
    for one in requests:
        engine.add(one)
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None, output.error
            choice = written[output.request_id, output.choice]
            choice.token_ids += output.token_ids
            choice.text += output.text
            choice.finish_reason = output.finish_reason
    return Run(written, engine.stats().num_preemptions)


def check(name: str, text: str) -> None:
    asked = ASKED[name]
    if "json" in asked:
        jsonschema.Draft202012Validator(asked["json"]).validate(json.loads(text))
    elif "regex" in asked:
        assert re.fullmatch(asked["regex"], text)
    else:
        assert text in asked["choice"]


@pytest.mark.parametrize("changes", PARAMS.values(), ids=PARAMS.keys())
def test_the_text_is_what_was_asked_for_under_every_parameter(
    model: PreTrainedModel, compiler: GrammarCompiler, changes: dict[str, Any]
) -> None:
    run = generate(model, *(request(compiler, name, changes) for name in ASKED))
    for (name, _), choice in run.choices.items():
        assert choice.finish_reason is FinishReason.STOP
        check(name, choice.text)


def test_a_grammar_ends_a_text_below_min_tokens_only_where_nothing_can_follow(
    model: PreTrainedModel, compiler: GrammarCompiler
) -> None:
    changes = {"min_tokens": 12, "logit_bias": {END: 100.0}}
    run = generate(model, *(request(compiler, name, changes) for name in ("letters", "choice")))
    assert len(run.choices["letters", 0].token_ids) >= 12
    assert run.choices["choice", 0].text in ("the tide turns", "the mill")


def test_each_choice_follows_the_grammar_by_itself(model: PreTrainedModel, compiler: GrammarCompiler) -> None:
    run = generate(model, request(compiler, "letters", {"n": 4, "temperature": 3.0}))
    texts = [choice.text for choice in run.choices.values()]
    for text in texts:
        check("letters", text)
    assert len(set(texts)) == 4


def test_a_stop_string_ends_a_text_before_its_grammar_does(
    model: PreTrainedModel, compiler: GrammarCompiler
) -> None:
    choice = generate(model, request(compiler, "person", {"stop": ['"age"']})).choices["person", 0]
    assert choice.finish_reason is FinishReason.STOP
    assert choice.text.startswith("{")
    assert '"age"' not in choice.text


def test_preemption_changes_no_token(model: PreTrainedModel, compiler: GrammarCompiler) -> None:
    changes = {"n": 8, "temperature": 2.0, "max_tokens": 150}
    endless = generate(model, *(request(compiler, name, changes) for name in ASKED))
    starved = generate(
        model, *(request(compiler, name, changes) for name in ASKED), num_blocks=40, block_size=4
    )
    assert endless.num_preemptions == 0
    assert starved.num_preemptions > 0
    assert starved.token_ids == endless.token_ids


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_a_resumed_text_goes_on_as_it_would_have(
    model: PreTrainedModel, compiler: GrammarCompiler, cut: int
) -> None:
    changes = {"temperature": 2.0}
    undisturbed = generate(model, request(compiler, "person", changes)).token_ids
    begun = {0: undisturbed["person", 0][:cut]}
    assert generate(model, request(compiler, "person", changes, begun)).token_ids == undisturbed
