"""The commands as a person types them, against a worker that serves the real model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import QUEUE
from tests.e2e.oracle import Oracle
from tests.e2e.processes import Worker, run_command
from tests.tidemill.servers import Server
from tests.worker.model.texts import paragraphs
from tidemill.client import Client
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Job, JobId
from tidemill.params import SamplingParams

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("worker")]

QUESTION = "What is the capital of France?"
GREEDY = ("--temperature", "0")


class Ended:
    """How a command ended, and what it printed."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out.decode(), err.decode()
        assert "Traceback" not in self.err

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Tidemill = Callable[..., Ended]


@pytest.fixture
def tidemill(server: Server) -> Tidemill:
    environment = {"REDIS_URL": server.url, "TIDEMILL_QUEUE": QUEUE}

    def run(*arguments: str, stdin: str = "") -> Ended:
        ended = run_command(*arguments, environment=environment, stdin=stdin.encode())
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    return run


def test_a_question_is_answered(tidemill: Tidemill) -> None:
    answer = tidemill("submit", "--chat", QUESTION, "--wait", "--max-tokens", "12", *GREEDY)
    assert (answer.code, answer.err) == (ExitCode.OK, "")
    assert answer.out.startswith("The capital of France is Paris")
    assert answer.out.count("\n") == 1


def test_json_is_the_whole_result(tidemill: Tidemill, oracle: Oracle) -> None:
    asked = ("submit", "-", "--system", "Answer in one word.", "--wait", "--json", "--max-tokens", "8")
    (result,) = tidemill(*asked, "--temperature", "0.8", "--seed", "11", stdin=QUESTION).objects
    job = Job.parse(
        {
            "messages": [
                {"role": "system", "content": "Answer in one word."},
                {"role": "user", "content": QUESTION},
            ],
            "params": {"max_tokens": 8, "temperature": 0.8, "seed": 11},
        }
    )
    answer = oracle.answers([job])[job.id]
    assert (result["status"], result["model"], result["error"]) == ("succeeded", QUEUE, None)
    assert (result["text"], result["token_ids"]) == (answer.text, list(answer.token_ids))
    assert result["usage"]["completion_tokens"] == len(answer.token_ids)
    assert result["timings"]["decode"] >= 0


def test_a_stream_is_the_text_in_pieces(tidemill: Tidemill) -> None:
    asked = ("submit", "The tide was", "--stream", "--max-tokens", "24", *GREEDY)
    whole = tidemill(*asked)
    *pieces, result = tidemill(*asked, "--json").objects
    assert (whole.code, whole.err) == (ExitCode.OK, "")
    assert whole.out == result["text"] + "\n"
    assert "".join(piece["text"] for piece in pieces) == result["text"]
    assert [token for piece in pieces for token in piece["token_ids"]] == result["token_ids"]


def test_a_file_of_jobs_with_bad_lines(tidemill: Tidemill, tmp_path: Path) -> None:
    """Every good line is answered, every bad one is named by its number."""
    lines = [
        json.dumps({"id": "line-1", "prompt": "1, 2, 3, 4, 5, 6,"}),
        "not json",
        json.dumps({"id": "line-3", "prompt": "The tide", "params": {"max_tokens": 3}}),
        json.dumps({"prompt": "x", "params": {"max_tokens": 0}}),
        "",
        json.dumps({"id": "line-6", "model": "another", "prompt": "x"}),
    ]
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(lines) + "\n")
    answered = tidemill("submit", "--file", str(path), "--wait", "--max-tokens", "5", *GREEDY)
    assert answered.code == ExitCode.USAGE
    results = {result["id"]: result for result in answered.objects}
    assert {job_id: result["status"] for job_id, result in results.items()} == {
        "line-1": "succeeded",
        "line-3": "succeeded",
        "line-6": "failed",
    }
    assert results["line-1"]["text"].startswith(" 7, 8")
    assert len(results["line-3"]["token_ids"]) == 3
    assert results["line-6"]["error"]["field"] == "model"
    assert answered.err.splitlines() == [
        f"tidemill: {path}:2: not JSON: Expecting value (column 1)",
        f"tidemill: {path}:4: params.max_tokens: Input should be greater than or equal to 1",
    ]


async def test_a_job_is_followed_and_cancelled(tidemill: Tidemill, client: Client) -> None:
    submitted = tidemill("submit", "--id", "followed", "Say nothing", "--max-tokens", "2", *GREEDY)
    assert (submitted.code, submitted.out) == (ExitCode.OK, "followed\n")
    result = tidemill("result", "followed", "--wait", "--json").objects[0]
    assert len(result["token_ids"]) == 2
    assert tidemill("result", "followed").out == result["text"] + "\n"
    assert tidemill("status", "followed", "--json").objects[0]["state"] == "done"
    assert tidemill("cancel", "followed").out == "finished\n"

    unknown = tidemill("status", "never-submitted")
    assert unknown.code == ExitCode.UNKNOWN_JOB
    assert (
        unknown.err
        == f"tidemill: job never-submitted is unknown in queue {QUEUE}, or its result has expired\n"
    )

    endless = Job.parse({"id": "endless", "prompt": "x", "params": {"max_tokens": 2000, "ignore_eos": True}})
    await client.submit(endless)
    assert tidemill("cancel", "endless").out in ("requested\n", "cancelled\n")
    ended = tidemill("result", "endless", "--wait")
    assert (ended.code, ended.out) == (ExitCode.FAILED, "")
    assert ended.err.startswith("tidemill: job endless cancelled (cancelled): ")


async def test_the_depth_is_shown(tidemill: Tidemill, client: Client) -> None:
    shown = tidemill("queue", "--queue", QUEUE, "--json").objects
    assert [(line["queue"], line["model"], line["total"]) for line in shown] == [(QUEUE, QUEUE, 0)]

    await client.submit(
        Job(id=JobId("tenant-job"), prompt="x", params=SamplingParams(max_tokens=2), tenant="harbour")
    )
    await client.result(JobId("tenant-job"), timeout=30)
    text = tidemill("queue", "--prometheus").out
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["queue"] == QUEUE
    }
    assert samples["tidemill_queue_depth"] == 0
    assert samples["tidemill_queue_running_jobs"] == 0
    table = tidemill("queue").out
    assert QUEUE in table


def test_the_doctor_finds_nothing_wrong(tidemill: Tidemill, tmp_path: Path) -> None:
    examined = tidemill("doctor", "--json", "--cache-dir", str(tmp_path))
    assert examined.code == ExitCode.OK, examined.out
    verdicts = {check["name"]: check["verdict"] for check in examined.objects}
    assert verdicts["redis"] == verdicts["kernels"] == verdicts["model"] == "ok"


def test_documents_are_summarized_once(tidemill: Tidemill, worker: Worker, tmp_path: Path) -> None:
    """A second run has the same jobs, and generates nothing."""
    text = paragraphs()
    (tmp_path / "first.md").write_text("# One\n\n" + "\n\n".join(text[:4]))
    (tmp_path / "second.md").write_text("# Two\n\n" + "\n\n".join(text[40:54]))
    asked = ("summarize", str(tmp_path), "--max-tokens", "16", "--chunk-tokens", "400", "--json")
    first = tidemill(*asked)
    assert first.code == ExitCode.OK, first.err
    summaries = {Path(line["document"]).name: line for line in first.objects}
    assert {*summaries} == {"first.md", "second.md"}
    assert all(line["status"] == "succeeded" and line["summary"] for line in summaries.values())
    assert summaries["second.md"]["chunks"] > 1
    assert first.err.startswith("2 documents, ")

    generated = worker.metric("tidemill_generation_tokens_total")
    again = tidemill(*asked)
    assert again.code == ExitCode.OK
    assert {Path(line["document"]).name: line["summary"] for line in again.objects} == {
        name: line["summary"] for name, line in summaries.items()
    }
    jobs = sum(line["jobs"] for line in summaries.values())
    assert again.err.rstrip().endswith(f"{jobs} of {jobs} jobs from an earlier run")
    assert worker.metric("tidemill_generation_tokens_total") == generated


def test_standard_input_is_summarized(tidemill: Tidemill) -> None:
    piped = tidemill("summarize", "-", "--max-tokens", "16", stdin="\n\n".join(paragraphs()[60:63]))
    assert piped.code == ExitCode.OK, piped.err
    title, _, summary, *_ = piped.out.splitlines()
    assert (title, bool(summary)) == ("# -", True)
    assert piped.out.splitlines()[-1].startswith("1 document, 1 chunk, ")
