"""`tidemill submit`: one job or a file of them; bad input is told by field, and harms no other job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.outcome import Outcome, Run
from tests.tidemill.echo_worker import FAIL
from tests.tidemill.servers import Server
from tidemill.blocking import BlockingClient
from tidemill.client import ClientSettings
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Job, JobId, Priority
from tidemill.moves import JobState, QueueSettings
from tidemill_producer.commands.jobs_file import JobsFile


def make_file(folder: Path, *lines: str | bytes | dict[str, Any]) -> str:
    path = folder / "jobs.jsonl"
    encoded = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return str(path)


class TestSubmit:
    def test_a_job_is_submitted_as_the_options_say(self, tidemill: Run, client: BlockingClient) -> None:
        shown = tidemill("submit", "a prompt", "--priority", "high", "--tenant", "team", "--deadline", "60")
        assert (shown.code, shown.err) == (ExitCode.OK, "")
        view = client.status(JobId(shown.out.strip()))
        assert (view.state, view.priority, view.tenant) == (JobState.WAITING, Priority.HIGH, "team")
        assert view.deadline_ms == view.submitted_ms + 60_000

    @pytest.mark.parametrize(
        ("options", "fields"),
        [
            (["x"], {"prompt": "x"}),
            (["x", "--model", "m"], {"prompt": "x", "model": "m"}),
            (["x", "--chat"], {"messages": [{"role": "user", "content": "x"}]}),
            (
                ["x", "--system", "be brief"],
                {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}]},
            ),
            (
                ["x", "--max-tokens", "7", "--temperature", "0", "--top-p", "0.5", "--top-k", "3"],
                {"prompt": "x", "params": {"max_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": 3}},
            ),
            (
                ["x", "--seed", "0", "--stop", "END", "--stop", "."],
                {"prompt": "x", "params": {"seed": 0, "stop": ["END", "."]}},
            ),
        ],
    )
    def test_options_become_fields(
        self, tidemill: Run, client: BlockingClient, options: list[str], fields: dict[str, Any]
    ) -> None:
        """Given a job submitted by the command, when the same one is submitted here, it is no conflict."""
        assert tidemill("submit", "--id", "a", *options).code == ExitCode.OK
        assert client.submit(Job.parse({"id": "a", **fields})) == "a"

    def test_a_prompt_may_come_from_standard_input(self, tidemill: Run, client: BlockingClient) -> None:
        tidemill("submit", "--id", "a", "-", stdin=b"two\nlines\n")
        assert client.submit(Job(id=JobId("a"), prompt="two\nlines")) == "a"

    @pytest.mark.usefixtures("worker")
    def test_waiting_prints_the_text_alone(self, tidemill: Run) -> None:
        assert tidemill("submit", "héllo", "--wait") == Outcome(ExitCode.OK, "héllo\n", "")

    @pytest.mark.usefixtures("worker")
    def test_waiting_with_json_prints_the_result_alone(self, tidemill: Run) -> None:
        shown = tidemill("submit", "echo", "--wait", "--json")
        (result,) = shown.objects
        assert (result["status"], result["text"], result["error"]) == ("succeeded", "echo", None)

    @pytest.mark.usefixtures("worker")
    def test_streaming_prints_the_text_as_it_comes(self, tidemill: Run) -> None:
        assert tidemill("submit", "echo", "--stream") == Outcome(ExitCode.OK, "echo\n", "")

    @pytest.mark.usefixtures("worker")
    def test_streaming_with_json_prints_deltas_and_the_result(self, tidemill: Run) -> None:
        *deltas, result = tidemill("submit", "echo", "--stream", "--json").objects
        assert "".join(delta["text"] for delta in deltas) == result["text"] == "echo"

    @pytest.mark.usefixtures("worker")
    @pytest.mark.parametrize("how", ["--wait", "--stream"])
    def test_a_failed_job_is_told_by_reason_and_exit_status(self, tidemill: Run, how: str) -> None:
        shown = tidemill("submit", FAIL, how)
        assert (shown.code, shown.out.strip()) == (ExitCode.FAILED, "")
        assert shown.err.endswith("failed (internal): asked to fail\n")

    def test_no_result_in_time_is_a_timeout(self, tidemill: Run) -> None:
        shown = tidemill("submit", "x", "--id", "a", "--timeout", "0.05")
        assert (shown.code, shown.out) == (ExitCode.TIMEOUT, "")
        assert shown.err == "tidemill: job a has no result after 0.05 s\n"

    def test_no_end_of_a_stream_in_time_is_a_timeout(self, tidemill: Run) -> None:
        shown = tidemill("submit", "x", "--id", "a", "--stream", "--timeout", "0.05")
        assert (shown.code, shown.out) == (ExitCode.TIMEOUT, "")
        assert shown.err == "tidemill: job a has not ended after 0.05 s\n"

    def test_json_names_the_job_and_its_queue(self, tidemill: Run, queue: str) -> None:
        assert tidemill("submit", "x", "--id", "a", "--json").objects == [{"id": "a", "queue": queue}]

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            (["x", "--temperature", "nan"], "params.temperature"),
            (["x", "--max-tokens", "0"], "params.max_tokens"),
            (["x", "--top-p", "1.5"], "params.top_p"),
            (["x", "--tenant", "a b"], "tenant"),
            (["x", "--deadline", "-1"], "deadline"),
            (["", "--priority", "high"], "prompt"),
            (["-"], "prompt"),
        ],
    )
    def test_an_invalid_job_is_one_line_that_names_the_field(
        self, tidemill: Run, options: list[str], field: str
    ) -> None:
        shown = tidemill("submit", *options, stdin=b"\xff")
        assert (shown.code, shown.out, shown.err.count("\n")) == (ExitCode.USAGE, "", 1)
        assert shown.err.startswith(f"tidemill: {field}: ")

    @pytest.mark.parametrize("options", [[], ["x", "--file", __file__], ["--file", __file__, "--chat"]])
    def test_what_does_not_go_together_is_wrong_usage(self, tidemill: Run, options: list[str]) -> None:
        shown = tidemill("submit", *options)
        assert (shown.code, shown.out) == (ExitCode.USAGE, "")
        assert "Error: " in shown.err

    def test_a_job_too_large_names_the_limit(self, tidemill: Run) -> None:
        shown = tidemill("submit", "-", stdin=b"x" * (1024 * 1024))
        assert shown.code == ExitCode.USAGE
        assert "at most 1048576 are allowed" in shown.err

    def test_another_job_under_the_same_id_is_refused(self, tidemill: Run) -> None:
        tidemill("submit", "x", "--id", "a")
        assert tidemill("submit", "y", "--id", "a").code == ExitCode.USAGE


class TestSubmitFile:
    def test_ids_are_printed_in_the_order_of_the_lines(
        self, tidemill: Run, client: BlockingClient, tmp_path: Path
    ) -> None:
        lines = [{"id": f"job-{number}", "prompt": "x"} for number in range(3)]
        shown = tidemill("submit", "--file", make_file(tmp_path, *lines))
        assert shown == Outcome(ExitCode.OK, "job-0\njob-1\njob-2\n", "")
        assert client.depth().total == 3

    def test_each_bad_line_is_told_and_the_others_are_submitted(
        self, tidemill: Run, client: BlockingClient, tmp_path: Path
    ) -> None:
        client.submit(Job(id=JobId("taken"), prompt="something else"))
        path = make_file(
            tmp_path,
            {"id": "good-1", "prompt": "x"},
            "{not json",
            "[1, 2]",
            b'{"prompt": "\xff"}',
            "",
            {"prompt": "x", "params": {"temperature": -1}},
            {"prompt": "x", "colour": "blue"},
            {"prompt": "x" * 2**20},
            {"id": "taken", "prompt": "x"},
            '{"prompt": "x", "params": {"top_p": NaN}}',
            {"id": "good-2", "prompt": "x"},
        )
        shown = tidemill("submit", "-f", path)
        assert (shown.code, shown.out) == (ExitCode.USAGE, "good-1\ngood-2\n")
        told = dict(line.removeprefix(f"tidemill: {path}:").split(": ", 1) for line in shown.err.splitlines())
        assert set(told) == {"2", "3", "4", "6", "7", "8", "9", "10"}
        assert told["2"].startswith("not JSON: ")
        assert told["3"] == "expected a JSON object, got list"
        assert told["4"] == "not UTF-8 (byte 13)"
        assert told["6"] == "params.temperature: Input should be greater than or equal to 0"
        assert told["7"].startswith("colour: ")
        assert "at most 1048576 are allowed" in told["8"]
        assert told["9"] == "job taken was submitted before with other content"
        assert told["10"].startswith("params.top_p: ")

    def test_options_fill_what_a_line_leaves_out(
        self, tidemill: Run, client: BlockingClient, tmp_path: Path
    ) -> None:
        path = make_file(
            tmp_path,
            {"id": "a", "prompt": "x"},
            {"id": "b", "prompt": "x", "tenant": "own", "params": {"max_tokens": 5}},
        )
        tidemill("submit", "-f", path, "--tenant", "team", "--max-tokens", "9", "--temperature", "0")
        assert client.status(JobId("a")).tenant == "team"
        assert client.status(JobId("b")).tenant == "own"
        for name, tokens in (("a", 9), ("b", 5)):
            params = {"max_tokens": tokens, "temperature": 0}
            assert client.submit(Job.parse({"id": name, "prompt": "x", "params": params})) == name

    @pytest.mark.usefixtures("worker")
    def test_waiting_prints_one_result_a_line_as_they_come(self, tidemill: Run) -> None:
        lines = [json.dumps({"id": f"job-{n}", "prompt": f"text {n}"}) for n in range(50)]
        lines.insert(20, json.dumps({"id": "bad", "prompt": FAIL}))
        shown = tidemill("submit", "--file", "-", "--wait", stdin="\n".join(lines).encode())
        assert (shown.code, shown.err) == (ExitCode.FAILED, "")
        texts = {result["id"]: result["text"] for result in shown.objects}
        assert texts == {f"job-{n}": f"text {n}" for n in range(50)} | {"bad": ""}

    def test_a_full_queue_stops_and_says_where(self, server: Server, queue: str, tmp_path: Path) -> None:
        settings = ClientSettings(queue=QueueSettings(max_depth=2))
        told: list[str] = []
        lines = [b'{"id": "%d", "prompt": "x"}' % number for number in range(1, 10)]
        jobs = JobsFile("jobs", lines, defaults={}, report=told.append)
        with BlockingClient(server.url, queue=queue, settings=settings) as client:
            assert list(client.submit_many(jobs, batch=3, on_error=jobs.refused)) == ["1", "2"]
        assert [line.partition(": ")[0] for line in told] == ["jobs:3", "jobs:4"]
        assert told[-1].endswith("not submitted, nor is any line after it")
        assert jobs.exit_code is ExitCode.QUEUE_FULL
