"""Parameters: what each may be, how a wrong one is told, and that two spellings of a job are one job."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import Job
from tidemill.params import MAX_SCHEMA_BYTES, SamplingParams, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def parse(**params: Any) -> SamplingParams:
    return Job.parse({"prompt": "x", "params": params}).params


def refusal(**params: Any) -> InvalidJob:
    with pytest.raises(InvalidJob) as refused:
        parse(**params)
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    return refused.value


BOUNDS: tuple[tuple[str, Any, Any, object], ...] = (
    # name, largest or smallest value, the first that is too much, the limit named
    ("max_tokens", 1, 0, 1),
    ("min_tokens", 0, -1, 0),
    ("temperature", 0.0, -0.1, 0.0),
    ("temperature", 100.0, 100.1, 100.0),
    ("n", 1, 0, 1),
    ("n", 64, 65, 64),
    ("top_k", -1, -2, -1),
    ("top_p", 1.0, 1.1, 1.0),
    ("top_p", 1e-9, 0.0, 0.0),
    ("min_p", 0.0, -0.1, 0.0),
    ("min_p", 1.0, 1.1, 1.0),
    ("repetition_penalty", 10.0, 10.1, 10.0),
    ("repetition_penalty", 1e-9, 0.0, 0.0),
    ("presence_penalty", -2.0, -2.1, -2.0),
    ("presence_penalty", 2.0, 2.1, 2.0),
    ("frequency_penalty", -2.0, -2.1, -2.0),
    ("frequency_penalty", 2.0, 2.1, 2.0),
    ("seed", 0, -1, 0),
    ("seed", 2**63 - 1, 2**63, 2**63),
    ("logprobs", 0, -1, 0),
    ("logprobs", 20, 21, 20),
    ("prompt_logprobs", 0, -1, 0),
    ("prompt_logprobs", 20, 21, 20),
    ("truncate_prompt_tokens", -1, -2, -1),
    ("stop", ["a"] * 16, ["a"] * 17, 16),
    ("stop_token_ids", [1] * 64, [1] * 65, 64),
    ("bad_words", ["a"] * 64, ["a"] * 65, 64),
    ("logit_bias", {str(i): 1 for i in range(1024)}, {str(i): 1 for i in range(1025)}, 1024),
)


@pytest.mark.parametrize(("name", "last", "first_wrong", "limit"), BOUNDS, ids=lambda value: str(value)[:20])
def test_a_value_past_its_bound_is_refused_by_field_and_limit(
    name: str, last: Any, first_wrong: Any, limit: object
) -> None:
    parse(**{name: last})
    error = refusal(**{name: first_wrong})
    assert (error.field, error.limit) == (f"params.{name}", limit)
    assert str(error).startswith(f"params.{name}: ")
    assert str(error).count("\n") == 0


@pytest.mark.parametrize(
    ("params", "field", "limit"),
    [
        ({"stop": ["a", ""]}, "params.stop.1", 1),
        ({"stop": "a" * 257}, "params.stop.0", 256),
        ({"bad_words": ["a" * 257]}, "params.bad_words.0", 256),
        ({"stop_token_ids": [3, -1]}, "params.stop_token_ids.1", 0),
        ({"stop_token_ids": [True]}, "params.stop_token_ids.0", None),
        ({"logit_bias": {"5": 100.5}}, "params.logit_bias.5", 100.0),
        ({"logit_bias": {"5": -100.5}}, "params.logit_bias.5", -100.0),
        ({"logit_bias": {"word": 1}}, "params.logit_bias.word.[key]", None),
        ({"logit_bias": {"-1": 1}}, "params.logit_bias.-1.[key]", 0),
        ({"logit_bias": [1]}, "params.logit_bias", None),
        ({"temperature": float("nan")}, "params.temperature", None),
        ({"frequency_penalty": float("inf")}, "params.frequency_penalty", None),
        ({"max_tokens": 2.5}, "params.max_tokens", None),
        ({"n": "3"}, "params.n", None),
        ({"logprobs": True}, "params.logprobs", None),
        ({"echo": "perhaps"}, "params.echo", None),
        ({"best_of": 2}, "params.best_of", None),
    ],
)
def test_a_wrong_value_is_told_by_its_place(params: dict[str, Any], field: str, limit: object) -> None:
    error = refusal(**params)
    assert (error.field, error.limit) == (field, limit)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": 5}, "params.stop: Input should be a valid list"),
        ({"stop": ["a"] * 17}, "params.stop: List should have at most 16 items, not 17"),
        ({"structured_outputs": "json"}, "params.structured_outputs: Input should be a valid object"),
    ],
)
def test_a_wrong_value_is_told_in_the_words_of_json(params: dict[str, Any], message: str) -> None:
    assert str(refusal(**params)) == message


@pytest.mark.parametrize(
    ("params", "field", "limit", "message"),
    [
        (
            {"min_tokens": 9, "max_tokens": 8},
            "params.min_tokens",
            8,
            "params.min_tokens: 9 exceeds max_tokens, 8",
        ),
        ({"min_tokens": 257}, "params.min_tokens", 256, "params.min_tokens: 257 exceeds max_tokens, 256"),
        (
            {"n": 3, "temperature": 0},
            "params.n",
            1,
            "params.n: 3 greedy generations would all be the same; ask for 1, or raise temperature",
        ),
        (
            {"truncate_prompt_tokens": 0},
            "params.truncate_prompt_tokens",
            None,
            "params.truncate_prompt_tokens: give at least 1, or -1 for what the context has room for",
        ),
    ],
)
def test_what_contradicts_another_field_names_both(
    params: dict[str, Any], field: str, limit: object, message: str
) -> None:
    error = refusal(**params)
    assert (error.field, error.limit, str(error)) == (field, limit, message)


def test_what_fits_another_field_is_taken() -> None:
    assert parse(min_tokens=8, max_tokens=8).min_tokens == 8
    assert parse(n=3, temperature=0.1).n == 3
    assert parse(n=1, temperature=0).n == 1


def test_one_string_stands_for_a_list_of_one() -> None:
    params = parse(stop="END", bad_words="nothing")
    assert (params.stop, params.bad_words) == (("END",), ("nothing",))


def test_token_ids_of_a_bias_may_be_text_as_json_has_them() -> None:
    assert parse(logit_bias={"5": -100, 7: 1.5}).logit_bias == {5: -100.0, 7: 1.5}


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        ({"json": SCHEMA}, "json"),
        ({"json": json.dumps(SCHEMA)}, "json"),
        ({"json": True}, "json"),
        ({"json_object": True}, "json_object"),
        ({"regex": "[a-z]+"}, "regex"),
        ({"choice": ["yes", "no"]}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
    ],
)
def test_structured_output_is_exactly_one_kind(outputs: dict[str, Any], kind: str) -> None:
    parsed = parse(structured_outputs=outputs).structured_outputs
    assert parsed is not None
    assert parsed.kind == kind
    if outputs.get("json") not in (None, True):
        assert parsed.json_schema == SCHEMA


PLACE = "params.structured_outputs"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("outputs", "field", "limit", "message"),
    [
        ({}, PLACE, None, "exactly one of json, json_object, regex, choice, grammar; got none"),
        ({"regex": "a", "json": SCHEMA}, PLACE, None, "got json, regex"),
        ({"json": "{"}, f"{PLACE}.json", None, "not JSON"),
        (
            {"json": {"const": "x" * MAX_SCHEMA_BYTES}},
            f"{PLACE}.json",
            None,
            f"at most {MAX_SCHEMA_BYTES} are taken",
        ),
        ({"json": '{"minimum": NaN}'}, f"{PLACE}.json", None, "not JSON"),
        ({"json": '{"maximum": 1e999}'}, f"{PLACE}.json", None, "not JSON"),
        ({"json": {"minimum": math.inf}}, f"{PLACE}.json", None, "not JSON"),
        ({"json": {"enum": {1, 2}}}, f"{PLACE}.json", None, "not JSON"),
        ({"json": {"const": "\ud800"}}, f"{PLACE}.json", None, "not JSON"),
        ({"json": nested(199)}, f"{PLACE}.json", None, "not JSON"),
        ({"json": '{"items":' * 5000 + "1" + "}" * 5000}, f"{PLACE}.json", None, "not JSON"),
        ({"json_object": False}, f"{PLACE}.json_object", "True", ""),
        ({"regex": ""}, f"{PLACE}.regex", 1, ""),
        ({"regex": "a" * (MAX_SCHEMA_BYTES + 1)}, f"{PLACE}.regex", MAX_SCHEMA_BYTES, ""),
        ({"grammar": "a" * (MAX_SCHEMA_BYTES + 1)}, f"{PLACE}.grammar", MAX_SCHEMA_BYTES, ""),
        ({"choice": []}, f"{PLACE}.choice", 1, ""),
        ({"choice": ["a", ""]}, f"{PLACE}.choice.1", 1, ""),
        ({"choice": ["a"] * 1025}, f"{PLACE}.choice", 1024, ""),
        ({"pattern": "a"}, f"{PLACE}.pattern", None, ""),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_structured_output_is_told_by_what_users_write(
    outputs: dict[str, Any], field: str, limit: object, message: str
) -> None:
    error = refusal(structured_outputs=outputs)
    assert (error.field, error.limit) == (field, limit)
    assert message in str(error)


@pytest.mark.parametrize(
    ("response_format", "outputs"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, {"json": SCHEMA}),
    ],
)
def test_response_format_is_another_spelling(response_format: object, outputs: dict[str, Any] | None) -> None:
    said = parse(response_format=response_format)
    assert said == parse(structured_outputs=outputs)
    assert "response_format" not in said.to_wire()


@pytest.mark.parametrize("wrong", [{"type": "xml"}, {"type": "json_schema"}, "json", {}])
def test_an_unknown_response_format_names_those_there_are(wrong: object) -> None:
    error = refusal(response_format=wrong)
    assert error.field == "params.response_format"
    assert str(error).startswith('params.response_format: give {"type": "text"}, {"type": "json_object"} or')


def test_response_format_and_structured_outputs_exclude_each_other() -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    error = refusal(**both)
    assert (error.field, str(error)) == (
        "params.response_format",
        "params.response_format: give this or structured_outputs, not both",
    )
    harmless = {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}
    assert parse(**harmless) == parse(structured_outputs={"regex": "a"})


EVERYTHING: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.7,
    "n": 3,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: -1.5, 3: 100.0},
    "bad_words": ("no", "never"),
    "seed": 2**63 - 1,
    "stop": ("END", "🌊"),
    "stop_token_ids": (3, 4),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": -1,
    "echo": True,
    "logprobs": 0,
    "prompt_logprobs": 20,
    "structured_outputs": {"json": SCHEMA},
}


def test_every_field_survives_the_wire() -> None:
    job = Job.parse({"id": "a", "prompt": "x", "params": EVERYTHING})
    assert set(EVERYTHING) == set(SamplingParams.model_fields)
    assert Job.from_wire(job.to_wire()) == job
    assert Job.from_wire(job.to_wire()).digest() == job.digest()
    assert '"json":{' in job.to_wire()


def test_a_job_without_params_says_nothing_of_them() -> None:
    assert json.loads(Job.parse({"id": "a", "prompt": "x"}).to_wire()) == {"id": "a", "prompt": "x"}


def test_structured_output_may_be_made_in_python_by_either_name() -> None:
    assert StructuredOutputs(json_schema=SCHEMA) == StructuredOutputs.model_validate({"json": SCHEMA})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"stop": "a"}, {"stop": ["a"]}),
        ({"temperature": 1}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"logit_bias": {"5": 1, "6": 2}}, {"logit_bias": {6: 2.0, 5: 1.0}}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"structured_outputs": {"json": SCHEMA}}),
        ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
    ],
)
def test_two_spellings_are_one_job(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Else a job that is sent again would be a conflict."""
    digests = {Job.parse({"prompt": "x", "params": params}).digest() for params in (one, other)}
    assert len(digests) == 1


def test_the_order_of_a_schema_is_part_of_the_work() -> None:
    """Properties come in the order of the schema, so another order is another text."""
    properties: list[dict[str, Any]] = [{"a": {}, "b": {}}, {"b": {}, "a": {}}]
    jobs = [
        Job.parse({"prompt": "x", "params": {"structured_outputs": {"json": {"properties": order}}}})
        for order in properties
    ]
    assert len({job.digest() for job in jobs}) == 2
    assert [Job.from_wire(job.to_wire()).digest() for job in jobs] == [job.digest() for job in jobs]


def test_a_schema_is_what_json_makes_of_it() -> None:
    """Else the worker would be given another one than the client has looked at."""
    outputs = StructuredOutputs(json_schema={"properties": {1: {"enum": ("a",)}}})
    assert outputs.json_schema == {"properties": {"1": {"enum": ["a"]}}}
    assert StructuredOutputs.from_wire(outputs.to_wire()) == outputs


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_every_field_is_part_of_the_work(name: str) -> None:
    plain = Job.parse({"prompt": "x"}).digest()
    changed = {"max_tokens": 300, name: EVERYTHING[name]}
    assert Job.parse({"prompt": "x", "params": changed}).digest() != plain


def test_the_digest_of_a_job_does_not_change_from_release_to_release() -> None:
    """A job that waits in the queue is compared with the same one sent by a newer client."""
    job = Job.parse({"prompt": "Once upon a time", "params": {"temperature": 0.5, "stop": ["END"]}})
    assert job.digest() == "252d82037dc8f9cd71734c1eb1c5312c"
