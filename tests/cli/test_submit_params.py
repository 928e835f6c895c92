"""Options of `tidemill submit` that become params, and how texts of several generations are printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.outcome import Outcome, Run
from tidemill.blocking import BlockingClient
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Job

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMAR = 'start: "yes" | "no"\n'


@pytest.mark.parametrize(
    ("options", "params"),
    [
        (["--n", "3"], {"n": 3}),
        (["-n", "2", "--temperature", "0.5"], {"n": 2, "temperature": 0.5}),
        (["--min-p", "0.1", "--min-tokens", "0"], {"min_p": 0.1}),
        (["--min-tokens", "4"], {"min_tokens": 4}),
        (
            ["--repetition-penalty", "1.5", "--presence-penalty", "-1", "--frequency-penalty", "0.5"],
            {"repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 0.5},
        ),
        (["--logprobs", "0", "--echo"], {"logprobs": 0, "echo": True}),
        (["--json-schema", json.dumps(SCHEMA)], {"structured_outputs": {"json": SCHEMA}}),
        (["--json-object"], {"structured_outputs": {"json_object": True}}),
        (["--regex", "[a-z]+"], {"structured_outputs": {"regex": "[a-z]+"}}),
        (["--choice", "yes", "--choice", "no"], {"structured_outputs": {"choice": ["yes", "no"]}}),
        (
            ["--param", 'logit_bias={"5": -1}', "--param", "bad_words=never", "--param", "ignore_eos=true"],
            {"logit_bias": {"5": -1}, "bad_words": "never", "ignore_eos": True},
        ),
        (["--param", "seed=1", "--seed", "2"], {"seed": 2}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_become_params(
    tidemill: Run, client: BlockingClient, options: list[str], params: dict[str, Any]
) -> None:
    """Given a job submitted by the command, when the same one is submitted here, it is no conflict."""
    shown = tidemill("submit", "x", "--id", "a", *options)
    assert (shown.code, shown.err) == (ExitCode.OK, "")
    assert client.submit(Job.parse({"id": "a", "prompt": "x", "params": params})) == "a"


@pytest.mark.parametrize(
    ("option", "content", "outputs"),
    [("--json-schema", json.dumps(SCHEMA), {"json": SCHEMA}), ("--grammar", GRAMMAR, {"grammar": GRAMMAR})],
)
def test_schemas_and_grammars_are_read_from_files(
    tidemill: Run,
    client: BlockingClient,
    tmp_path: Path,
    option: str,
    content: str,
    outputs: dict[str, Any],
) -> None:
    path = tmp_path / "asked"
    path.write_text(content)
    assert tidemill("submit", "x", "--id", "a", option, str(path)).code == ExitCode.OK
    job = Job.parse({"id": "a", "prompt": "x", "params": {"structured_outputs": outputs}})
    assert client.submit(job) == "a"


@pytest.mark.parametrize("option", ["--json-schema", "--grammar"])
def test_a_file_that_is_not_there_is_named(tidemill: Run, option: str) -> None:
    shown = tidemill("submit", "x", option, "nowhere.json")
    assert (shown.code, shown.out) == (ExitCode.USAGE, "")
    assert option in shown.err
    assert "nowhere.json: No such file or directory" in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "65"], "params.n: "),
        (["--n", "2", "--temperature", "0"], "params.n: 2 greedy generations"),
        (["--min-tokens", "9", "--max-tokens", "8"], "params.min_tokens: 9 exceeds max_tokens, 8"),
        (["--regex", "a", "--json-object"], "params.structured_outputs: give exactly one of"),
        (["--json-schema", "{"], "params.structured_outputs.json: not JSON"),
        (["--param", "tempo=1"], "params.tempo: "),
    ],
)
def test_wrong_params_are_one_line(tidemill: Run, options: list[str], message: str) -> None:
    shown = tidemill("submit", "x", *options)
    assert (shown.code, shown.out, shown.err.count("\n")) == (ExitCode.USAGE, "", 1)
    assert shown.err.startswith(f"tidemill: {message}")


@pytest.mark.parametrize("assignment", ["seed", "=1"])
def test_a_param_has_a_name_and_a_value(tidemill: Run, assignment: str) -> None:
    shown = tidemill("submit", "x", "--param", assignment)
    assert (shown.code, shown.out) == (ExitCode.USAGE, "")
    assert "is not NAME=JSON" in shown.err


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("how", ["--wait", "--stream"])
def test_texts_of_several_generations_stand_apart(tidemill: Run, how: str) -> None:
    shown = tidemill("submit", "echo", "--n", "3", how)
    assert shown == Outcome(ExitCode.OK, "--- 1 of 3\necho\n--- 2 of 3\necho!\n--- 3 of 3\necho!!\n", "")


@pytest.mark.usefixtures("worker")
def test_json_has_all_generations(tidemill: Run) -> None:
    *deltas, result = tidemill("submit", "echo", "--n", "2", "--stream", "--json").objects
    assert [result["text"], *(choice["text"] for choice in result["alternatives"])] == ["echo", "echo!"]
    for choice, text in enumerate(["echo", "echo!"]):
        assert "".join(delta["text"] for delta in deltas if delta["choice"] == choice) == text


@pytest.mark.usefixtures("worker")
def test_a_result_that_is_asked_for_later_has_them_too(tidemill: Run, client: BlockingClient) -> None:
    client.submit(Job.parse({"id": "a", "prompt": "x", "params": {"n": 2}}))
    assert tidemill("result", "a", "--wait").out == "--- 1 of 2\nx\n--- 2 of 2\nx!\n"


def test_options_fill_what_a_line_leaves_out_of_its_params(
    tidemill: Run, client: BlockingClient, tmp_path: Path
) -> None:
    """A line's own words win, also if they are others for the same thing."""
    lines = [
        {"id": "plain", "prompt": "x"},
        {"id": "own", "prompt": "x", "params": {"min_p": 0.5, "response_format": {"type": "json_object"}}},
    ]
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = tidemill("submit", "--file", str(path), "--min-p", "0.1", "--regex", "a+")
    assert (shown.code, shown.err) == (ExitCode.OK, "")
    for name, params in (
        ("plain", {"min_p": 0.1, "structured_outputs": {"regex": "a+"}}),
        ("own", {"min_p": 0.5, "structured_outputs": {"json_object": True}}),
    ):
        assert client.submit(Job.parse({"id": name, "prompt": "x", "params": params})) == name


def test_help_lists_options_under_headings(tidemill: Run) -> None:
    shown = tidemill("submit", "--help").out
    headings = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Arguments:", "Options:", "Length:", "Sampling:", "Structured output:", "Report:"]
