"""`tidemill summarize` as people and scripts see it: streams, files, exit statuses."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.processes import confined
from tests.producer.factories import ENGLISH, make_text
from tests.producer.fake_worker import brief, brief_of, serving_in_thread, text_of
from tests.tidemill.servers import Server, free_port
from tidemill.__main__ import main
from tidemill.blocking import BlockingClient
from tidemill.client import ClientSettings
from tidemill.jobs import Job
from tidemill.moves import QueueSettings

BRIEF = brief_of(ENGLISH.strip())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "mill.md").write_text(ENGLISH)
    return tmp_path


def run(server: Server, queue: str, *arguments: str) -> int:
    return main(["summarize", "--redis-url", server.url, "--queue", queue, *arguments])


def test_each_summary_has_its_document_as_heading_and_the_last_line_counts(
    server: Server, queue: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_in_thread(server.url, queue):
        code = run(server, queue, "docs")

    said = capsys.readouterr()
    assert code == 0
    assert said.out.startswith(f"# docs/mill.md\n\n{BRIEF}\n\n")
    assert said.out.splitlines()[-1].startswith("1 document, 1 chunk, 107 tokens (100 in, 7 out), ")
    assert said.out.endswith(" tokens/s\n")
    assert said.err == ""


def test_json_is_one_object_a_line(
    server: Server, queue: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "docs" / "empty.txt").write_text("")
    with serving_in_thread(server.url, queue):
        code = run(server, queue, "docs", "--json")

    said = capsys.readouterr()
    failed, succeeded = sorted(map(json.loads, said.out.splitlines()), key=lambda line: line["status"])
    assert code == 1
    assert failed == {"document": "docs/empty.txt", "status": "failed", "error": "empty"}
    assert succeeded == {
        "document": "docs/mill.md",
        "status": "succeeded",
        "summary": BRIEF,
        "chunks": 1,
        "jobs": 1,
        "reused_jobs": 0,
        "reused_tokens": 0,
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "cached_tokens": 64,
    }
    assert said.err.startswith("1 document, 1 failed, 1 chunk, ")


def test_standard_input_is_summarized(
    server: Server, queue: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(ENGLISH.encode())))
    with serving_in_thread(server.url, queue):
        assert run(server, queue, "-") == 0

    assert capsys.readouterr().out.startswith(f"# -\n\n{BRIEF}\n")


def test_summaries_are_written_under_the_folder(
    server: Server, queue: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a folder inside the documents' own, when run twice, then summaries are not summarized."""
    with serving_in_thread(server.url, queue) as worker:
        for _ in range(2):
            assert run(server, queue, "docs", "../" + folder.name + "/docs/mill.md", "--out", "docs/out") == 0

    written = {path.relative_to(folder / "docs" / "out") for path in (folder / "docs" / "out").rglob("*.*")}
    assert written == {
        Path("docs/mill.md.summary.txt"),
        Path("_", folder.name, "docs/mill.md.summary.txt"),
    }
    assert (folder / "docs/out/docs/mill.md.summary.txt").read_text() == f"{BRIEF}\n"
    assert "docs/mill.md -> docs/out/docs/mill.md.summary.txt\n" in capsys.readouterr().out
    assert len(worker.jobs) == 1


def test_options_reach_the_jobs(server: Server, queue: str, folder: Path) -> None:
    arguments = ("--max-tokens", "50", "--chunk-tokens", "200", "--instruction", "Be brief.")
    with serving_in_thread(server.url, queue) as worker:
        assert run(server, queue, "docs", *arguments, "--tenant", "acme", "--priority", "low") == 0

    (job,) = worker.jobs
    assert [message.content for message in job.messages or ()] == [
        "Be brief.",
        f"Be brief.\n\n{ENGLISH.strip()}",
    ]
    assert (job.params.max_tokens, job.tenant, job.priority) == (50, "acme", "low")


def test_a_failed_document_is_one_line_and_exit_status_1(
    server: Server, queue: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "docs" / "bad.txt").write_bytes(b"\xff")
    with serving_in_thread(server.url, queue):
        code = run(server, queue, "docs")

    said = capsys.readouterr()
    assert code == 1
    assert said.err == "tidemill: docs/bad.txt: not utf-8 at byte 0: invalid start byte\n"
    assert f"# docs/mill.md\n\n{BRIEF}\n" in said.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["docs/nothing.md"], "there is no docs/nothing.md"),
        (["-", "-"], "standard input can be read once only"),
        (["docs", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["docs", "--priority", "urgent"], "urgent"),
        ([], "PATH"),
    ],
)
def test_wrong_usage_is_exit_status_2_and_submits_nothing(
    server: Server,
    queue: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run(server, queue, *arguments) == 2
    assert message in capsys.readouterr().err


def test_no_worker_is_exit_status_4(
    server: Server, queue: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, queue, "docs", "--wait", "0") == 4
    assert capsys.readouterr().err == f"tidemill: no worker serves queue {queue}\n"


def test_no_room_in_time_is_exit_status_6(
    server: Server,
    queue: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = partial(ClientSettings, queue=QueueSettings(max_depth=1))
    monkeypatch.setattr("tidemill.client.ClientSettings", settings)
    with (
        serving_in_thread(server.url, queue, lambda _: None),
        BlockingClient(server.url, queue=queue) as client,
    ):
        client.submit(Job(prompt="in the way"))
        assert run(server, queue, "docs", "--wait-for-room", "0.1") == 6
    assert capsys.readouterr().err == f"tidemill: queue {queue} holds 1 unfinished jobs\n"


def test_no_redis_is_exit_status_4(queue: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    assert main(["summarize", "docs", "--redis-url", url, "--queue", queue]) == 4
    assert "cannot be reached" in capsys.readouterr().err


def test_no_result_in_time_is_exit_status_5(
    server: Server, queue: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_in_thread(server.url, queue, lambda _: None):
        assert run(server, queue, "docs", "--timeout", "0.5") == 5
    assert "run the same command again to continue" in capsys.readouterr().err


def test_an_interrupt_leaves_the_jobs_and_the_same_command_continues(
    server: Server, queue: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "docs" / "mill.md").write_text(make_text(200))
    held = threading.Event()

    def hold(job: Job) -> str | None:
        if "number 1 says" in text_of(job):
            return brief(job)
        held.set()
        return None

    command = [sys.executable, "-m", "tidemill", "summarize", "docs"]
    arguments = ["--redis-url", server.url, "--queue", queue, "--max-tokens", "100"]
    with (
        serving_in_thread(server.url, queue, hold) as worker,
        confined(subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)) as process,
    ):
        assert held.wait(20)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)

        assert process.returncode == 130
        assert said.splitlines()[-1] == (
            "tidemill: interrupted; submitted jobs stay in the queue; run the same command again to continue"
        )

        worker.answer = brief
        worker.answer_held_soon()
        assert run(server, queue, "docs", "--max-tokens", "100") == 0

    assert set(worker.claims.values()) == {1}, "no job was run twice"
    assert " jobs from an earlier run" in capsys.readouterr().out
