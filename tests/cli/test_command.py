"""The `tidemill` command: its parts, what it prints where, and what its exit status means."""

from __future__ import annotations

import subprocess
import sys
import uuid

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.outcome import Outcome, Run
from tests.tidemill.servers import Server, free_port
from tidemill.__main__ import COMMANDS
from tidemill.blocking import BlockingClient
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Job, JobId

OURS = ("submit", "result", "status", "cancel", "queue", "workers")


class TestMounting:
    def test_help_names_every_command_and_the_exit_codes(self, tidemill: Run) -> None:
        shown = tidemill("--help")
        assert shown.code == ExitCode.OK
        assert all(f"  {name} " in shown.out for name in COMMANDS)
        assert "4 the queue is unavailable" in shown.out

    @pytest.mark.parametrize("name", OURS)
    def test_every_command_explains_itself_and_its_exit_codes(self, tidemill: Run, name: str) -> None:
        shown = tidemill(name, "--help")
        assert shown.code == ExitCode.OK
        assert f"Usage: tidemill {name}" in shown.out
        assert "Exit status: 0 done;" in shown.out

    def test_help_loads_neither_a_model_library_nor_redis(self) -> None:
        program = (
            "import sys; from tidemill.__main__ import main; main(['--help'])\n"
            "print([n for n in ('torch', 'transformers', 'redis', 'tidemill_worker') if n in sys.modules])"
        )
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert run.stdout.splitlines()[-1] == "[]"

    def test_the_module_can_be_run(self) -> None:
        run = subprocess.run(
            [sys.executable, "-m", "tidemill", "bogus"], capture_output=True, text=True, check=False
        )
        assert (run.returncode, run.stdout) == (ExitCode.USAGE, "")
        assert "No such command 'bogus'" in run.stderr

    def test_the_version_is_printed(self, tidemill: Run) -> None:
        shown = tidemill("--version")
        assert shown.code == ExitCode.OK
        assert shown.out.strip().count(".") == 2

    @pytest.mark.parametrize(
        ("missing", "command", "extra"),
        [("typer", "submit", "cli"), ("typer", "--help", "cli"), ("torch", "worker", "worker")],
    )
    def test_a_missing_extra_is_one_clear_line(
        self, tidemill: Run, monkeypatch: pytest.MonkeyPatch, missing: str, command: str, extra: str
    ) -> None:
        monkeypatch.setitem(sys.modules, missing, None)
        shown = tidemill(command)
        assert (shown.code, shown.out) == (ExitCode.FAILED, "")
        assert shown.err == f"tidemill: {missing} is not installed; run: pip install 'tidemill[{extra}]'\n"


class TestAnswers:
    @pytest.mark.usefixtures("worker")
    def test_a_result_is_waited_for_and_printed(self, tidemill: Run, client: BlockingClient) -> None:
        client.submit(Job(id=JobId("a"), prompt="echo"))
        assert tidemill("result", "a", "--wait") == Outcome(ExitCode.OK, "echo\n", "")
        (result,) = tidemill("result", "a", "--json").objects
        assert (result["id"], result["text"], result["usage"]["completion_tokens"]) == ("a", "echo", 4)

    def test_no_result_yet_is_a_timeout(self, tidemill: Run, client: BlockingClient) -> None:
        client.submit(Job(id=JobId("a"), prompt="x"))
        for options in ([], ["--timeout", "0.05"]):
            shown = tidemill("result", "a", *options)
            assert (shown.code, shown.out) == (ExitCode.TIMEOUT, "")
            assert shown.err.startswith("tidemill: job a has no result after ")

    def test_status_shows_where_a_job_is(self, tidemill: Run, client: BlockingClient) -> None:
        client.submit(Job(id=JobId("a"), prompt="x", tenant="team"))
        lines = dict(line.split(maxsplit=1) for line in tidemill("status", "a").out.splitlines())
        assert (lines["state"], lines["tenant"], lines["replies"]) == ("waiting", "team", client.results)
        (view,) = tidemill("status", "a", "--json").objects
        assert (view["state"], view["worker"], view["replies"]) == ("waiting", None, {client.results: None})

    def test_cancelling_prints_what_it_did(self, tidemill: Run, client: BlockingClient) -> None:
        client.submit(Job(id=JobId("a"), prompt="x"))
        assert tidemill("cancel", "a") == Outcome(ExitCode.OK, "cancelled\n", "")
        assert tidemill("cancel", "a", "--json").objects == [{"id": "a", "outcome": "cancelled"}]
        shown = tidemill("result", "a")
        assert (shown.code, shown.out) == (ExitCode.FAILED, "")
        assert "job a cancelled" in shown.err

    @pytest.mark.parametrize("command", ["result", "status", "cancel"])
    def test_an_unknown_job_has_an_exit_status_of_its_own(self, tidemill: Run, command: str) -> None:
        shown = tidemill(command, "ghost")
        assert (shown.code, shown.out, shown.err.count("\n")) == (ExitCode.UNKNOWN_JOB, "", 1)
        assert shown.err.startswith("tidemill: job ghost is unknown in queue test/")

    @pytest.mark.parametrize("arguments", [["submit", "x"], ["result", "a"], ["cancel", "a"], ["queue"]])
    def test_redis_down_is_one_line_without_the_password(self, tidemill: Run, arguments: list[str]) -> None:
        port = free_port()
        shown = tidemill(*arguments, "--redis-url", f"redis://:hunter2@127.0.0.1:{port}/0")
        assert (shown.code, shown.out, shown.err.count("\n")) == (ExitCode.UNAVAILABLE, "", 1)
        assert f"127.0.0.1:{port} cannot be reached" in shown.err
        assert "hunter2" not in shown.err

    @pytest.mark.parametrize("command", ["submit", "workers", "summarize"])
    def test_the_help_names_every_kind_of_url(self, tidemill: Run, command: str) -> None:
        shown = " ".join(tidemill(command, "--help").out.split())
        for tls in ("redis", "rediss"):
            for kind in ("", "+sentinel", "+cluster"):
                assert f"{tls}{kind}://" in shown
        assert "unix://" in shown

    def test_a_queue_must_be_named(self, tidemill: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TIDEMILL_QUEUE")
        shown = tidemill("status", "a")
        assert shown.code == ExitCode.USAGE
        assert "TIDEMILL_QUEUE" in shown.err

    def test_a_wrong_name_of_a_queue_is_wrong_usage(self, tidemill: Run) -> None:
        shown = tidemill("status", "a", "--queue", "two words")
        assert (shown.code, shown.err.count("\n")) == (ExitCode.USAGE, 1)
        assert "queue: 'two words' is not a name" in shown.err


class TestQueue:
    @pytest.fixture(autouse=True)
    def some_jobs(self, client: BlockingClient) -> None:
        for priority, tenant, count in (("high", "team", 2), ("normal", "other", 1)):
            fields = {"prompt": "x", "priority": priority, "tenant": tenant}
            list(client.submit_many(Job.parse(fields) for _ in range(count)))

    def test_people_get_a_table(self, tidemill: Run, queue: str) -> None:
        shown = tidemill("queue", "-q", queue)
        title, total, *rows = (line.split() for line in shown.out.splitlines())
        assert title[:3] == ["QUEUE", "WAITING", "RUNNING"]
        assert total[:3] == [queue, "3", "0"]
        assert total[-4:] == ["nobody", "serves", "this", "queue"]
        assert rows == [["high", "team", "2"], ["normal", "other", "1"]]

    def test_programs_get_json(self, tidemill: Run, queue: str) -> None:
        (shown,) = tidemill("queue", "-q", queue, "--json").objects
        assert (shown["queue"], shown["model"], shown["total"], shown["running"]) == (queue, None, 3, 0)
        assert sorted(shown["by_tenant"], key=lambda row: str(row["tenant"])) == [
            {"priority": "normal", "tenant": "other", "waiting": 1},
            {"priority": "high", "tenant": "team", "waiting": 2},
        ]

    def test_prometheus_gets_its_text_format(self, tidemill: Run, queue: str) -> None:
        families = {
            family.name: family
            for family in text_string_to_metric_families(tidemill("queue", "-q", queue, "--prometheus").out)
        }
        assert all(name.startswith("tidemill_queue_") for name in families)
        assert {family.type for family in families.values()} == {"gauge"}
        (depth,) = families["tidemill_queue_depth"].samples
        assert (depth.labels, depth.value) == ({"queue": queue}, 3.0)
        waiting = {
            (sample.labels["priority"], sample.labels["tenant"]): sample.value
            for sample in families["tidemill_queue_waiting_jobs"].samples
        }
        assert waiting == {("high", "team"): 2.0, ("normal", "other"): 1.0}

    def test_all_queues_are_shown_unless_some_are_named(
        self, tidemill: Run, server: Server, queue: str
    ) -> None:
        other = f"another/{uuid.uuid4().hex[:8]}"
        with BlockingClient(server.url, queue=other) as client:
            client.submit(Job(prompt="x"))
        assert {shown["queue"] for shown in tidemill("queue", "--json").objects} >= {queue, other}
        both = tidemill("queue", "--json", "-q", other, "-q", queue).objects
        assert [shown["queue"] for shown in both] == [other, queue]

    def test_a_queue_that_does_not_exist_is_empty(self, tidemill: Run) -> None:
        (shown,) = tidemill("queue", "-q", "nothing-here", "--json").objects
        assert (shown["total"], shown["oldest_waiting"], shown["by_tenant"]) == (0, None, [])

    def test_two_formats_at_once_are_wrong_usage(self, tidemill: Run) -> None:
        assert tidemill("queue", "--json", "--prometheus").code == ExitCode.USAGE
