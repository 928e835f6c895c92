"""`tidemill dead`: jobs that were given up are listed, shown, requeued and purged."""

from __future__ import annotations

import pytest

from tests.cli.fleet import bury
from tests.cli.outcome import Outcome, Run
from tests.tidemill.servers import Server
from tidemill.blocking import BlockingClient
from tidemill.client import ClientSettings
from tidemill.errors import QueueFull
from tidemill.exit_codes import ExitCode
from tidemill.jobs import Job, JobId
from tidemill.moves import JobState, QueueSettings

ACTIONS = ("list", "show", "requeue", "purge")


def make_job(name: str, **fields: object) -> Job:
    return Job.parse({"id": name, "prompt": "Once upon a time", **fields})


@pytest.fixture
def letters(server: Server, queue: str) -> None:
    """Two jobs that were given up: `a` and `b`."""
    bury(server, queue, make_job("a", tenant="team"), make_job("b", prompt="\x1b[2J two\nlines"))


def entry_of(client: BlockingClient, name: str) -> str:
    return client.dead_letter(name).entry_id


class TestMounting:
    def test_the_group_explains_itself_and_its_commands(self, tidemill: Run) -> None:
        shown = tidemill("dead", "--help")
        assert shown.code == ExitCode.OK
        assert all(f"  {name} " in shown.out for name in ACTIONS)
        assert "Exit status: 0 done;" in shown.out

    @pytest.mark.parametrize("name", ACTIONS)
    def test_each_command_explains_itself(self, tidemill: Run, name: str) -> None:
        shown = tidemill("dead", name, "--help")
        assert shown.code == ExitCode.OK
        assert f"Usage: tidemill dead {name}" in shown.out
        assert "Exit status: 0 done;" in shown.out

    def test_a_command_that_is_none_is_wrong_usage(self, tidemill: Run) -> None:
        shown = tidemill("dead", "bury")
        assert (shown.code, shown.out) == (ExitCode.USAGE, "")
        assert "No such command 'bury'" in shown.err


@pytest.mark.usefixtures("letters")
class TestList:
    def test_people_get_a_table_that_cannot_steer_their_terminal(self, tidemill: Run) -> None:
        title, first, second = tidemill("dead", "list").out.splitlines()
        assert title.split() == ["ID", "WHEN", "ATTEMPTS", "WORKER", "TENANT", "PROMPT"]
        assert first.split()[0] == "a"
        assert first.split()[3:] == ["1", "lost-worker", "team", "Once", "upon", "a", "time"]
        assert second.split()[5:] == ["default", "\N{REPLACEMENT CHARACTER}[2J", "two", "lines"]

    def test_programs_get_json(self, tidemill: Run, client: BlockingClient) -> None:
        first, second = tidemill("dead", "list", "--json").objects
        entry_id = entry_of(client, "a")
        assert first == {
            "id": "a",
            "entry_id": entry_id,
            "buried_ms": int(entry_id.split("-")[0]),
            "attempts": 1,
            "worker": "lost-worker",
            "tenant": "team",
            "prompt": "Once upon a time",
        }
        assert second["id"] == "b"

    def test_a_limit_says_that_there_are_more(self, tidemill: Run) -> None:
        shown = tidemill("dead", "list", "--json", "--limit", "1")
        assert [letter["id"] for letter in shown.objects] == ["a"]
        assert shown.err == "tidemill: there are more than 1; --limit 0 shows all\n"
        assert len(tidemill("dead", "list", "--json", "--limit", "0").objects) == 2

    def test_a_payload_that_is_no_job_is_listed_all_the_same(
        self, tidemill: Run, server: Server, queue: str, client: BlockingClient
    ) -> None:
        with server.client() as redis:
            redis.xadd(f"tidemill:{{{queue}}}:dead", {"id": "c", "payload": "{broken", "failures": 3})
        *_, third = tidemill("dead", "list", "--json").objects
        assert (third["id"], third["tenant"], third["prompt"]) == ("c", None, "{broken")
        (shown,) = tidemill("dead", "show", "c", "--json").objects
        assert (shown["job"], shown["payload"], shown["result"]) == (None, "{broken", None)
        requeued = tidemill("dead", "requeue", "--all")
        assert (requeued.code, requeued.err.count("\n")) == (ExitCode.USAGE, 1)
        assert requeued.err.startswith("tidemill: job c: ")
        assert len(requeued.out.splitlines()) == 2


@pytest.mark.usefixtures("letters")
class TestShow:
    def test_people_get_all_of_it_by_either_id(self, tidemill: Run, client: BlockingClient) -> None:
        for name in ("a", entry_of(client, "a")):
            fields = dict(line.split(maxsplit=1) for line in tidemill("dead", "show", name).out.splitlines())
            assert (fields["id"], fields["worker"], fields["attempts"]) == ("a", "lost-worker", "1")
            assert fields["job"] == '{"id": "a", "prompt": "Once upon a time", "tenant": "team"}'
            assert fields["error"].startswith("attempts_exhausted: given up after 1 ")
            assert "payload" not in fields

    def test_programs_get_the_job_and_its_result(self, tidemill: Run) -> None:
        (shown,) = tidemill("dead", "show", "a", "--json").objects
        assert shown["job"] == {"id": "a", "prompt": "Once upon a time", "tenant": "team"}
        assert shown["result"]["error"]["code"] == "attempts_exhausted"

    def test_a_result_that_has_expired_is_left_out(self, tidemill: Run, server: Server, queue: str) -> None:
        with server.client() as redis:
            redis.delete(f"tidemill:{{{queue}}}:job:a")
        (shown,) = tidemill("dead", "show", "a", "--json").objects
        assert shown["result"] is None
        assert "error" not in tidemill("dead", "show", "a").out


@pytest.mark.usefixtures("letters")
class TestRequeue:
    def test_old_and_new_id_are_printed_and_the_job_waits_again(
        self, tidemill: Run, client: BlockingClient
    ) -> None:
        shown = tidemill("dead", "requeue", "b", "a")
        pairs = [line.split() for line in shown.out.splitlines()]
        assert (shown.code, [old for old, _ in pairs]) == (ExitCode.OK, ["b", "a"])
        assert {client.status(JobId(new)).state for _, new in pairs} == {JobState.WAITING}
        assert client.depth().dead_letters == 0

    def test_a_repeat_runs_nothing_twice(self, tidemill: Run, client: BlockingClient) -> None:
        assert tidemill("dead", "requeue", "a").code == ExitCode.OK
        again = tidemill("dead", "requeue", "a", "b")
        assert again.code == ExitCode.UNKNOWN_JOB
        assert again.out.startswith("b ")
        assert again.err.startswith("tidemill: there is no dead letter a in queue test/")
        assert client.depth().total == 2

    def test_all_means_those_that_are_there(self, tidemill: Run, queue: str, client: BlockingClient) -> None:
        objects = tidemill("dead", "requeue", "--all", "--json").objects
        assert [(shown["requeued_from"], shown["queue"]) for shown in objects] == [("a", queue), ("b", queue)]
        assert tidemill("dead", "requeue", "--all") == Outcome(ExitCode.OK, "", "")
        assert client.depth().total == 2

    def test_answers_go_where_they_are_asked_for(self, tidemill: Run, client: BlockingClient) -> None:
        (shown,) = tidemill("dead", "requeue", "a", "--reply-to", "operator", "--json").objects
        assert list(client.status(JobId(shown["id"])).replies) == ["operator"]
        wrong = tidemill("dead", "requeue", "b", "--reply-to", "two words")
        assert (wrong.code, wrong.err.count("\n")) == (ExitCode.USAGE, 1)

    def test_a_full_queue_keeps_the_letter(self, server: Server, queue: str, client: BlockingClient) -> None:
        settings = ClientSettings(queue=QueueSettings(max_depth=1))
        with BlockingClient(server.url, queue=queue, settings=settings) as limited:
            limited.submit(Job(prompt="x"))
            with pytest.raises(QueueFull):
                limited.requeue(limited.dead_letter("a"))
        assert client.dead_letter("a").job_id == "a"


@pytest.mark.usefixtures("letters")
class TestPurge:
    @pytest.mark.parametrize("arguments", [["a"], ["--all"]])
    @pytest.mark.parametrize(
        ("stdin", "code", "last"),
        [
            (b"n\n", ExitCode.OK, "tidemill: nothing was purged"),
            (b"\n", ExitCode.OK, "tidemill: nothing was purged"),
            (b"", ExitCode.FAILED, "Aborted!"),
        ],
        ids=["no", "return", "nobody there"],
    )
    def test_nothing_is_purged_without_a_yes(
        self,
        tidemill: Run,
        client: BlockingClient,
        arguments: list[str],
        stdin: bytes,
        code: ExitCode,
        last: str,
    ) -> None:
        """A no is an answer like any other; nobody to answer is a mistake of whoever wrote the script."""
        shown = tidemill("dead", "purge", *arguments, stdin=stdin)
        assert (shown.code, shown.out) == (code, "")
        assert "for good? [y/N]" in shown.err
        assert shown.err.endswith(f"{last}\n")
        assert client.depth().dead_letters == 2

    def test_a_yes_purges_and_error_results_stay(self, tidemill: Run, client: BlockingClient) -> None:
        shown = tidemill("dead", "purge", "a", stdin=b"y\n")
        assert (shown.code, shown.out) == (ExitCode.OK, "1\n")
        assert [letter.job_id for letter in client.dead_letters()] == ["b"]
        assert client.result(JobId("a"), timeout=0).error is not None

    def test_who_says_yes_beforehand_is_not_asked(self, tidemill: Run, queue: str) -> None:
        shown = tidemill("dead", "purge", "--all", "--yes", "--json")
        assert (shown.objects, shown.err) == ([{"queue": queue, "purged": 2}], "")
        assert tidemill("dead", "purge", "--all") == Outcome(ExitCode.OK, "0\n", "")

    def test_an_unknown_one_hinders_no_other(self, tidemill: Run, client: BlockingClient) -> None:
        shown = tidemill("dead", "purge", "ghost", "b", "b", "--yes")
        assert (shown.code, shown.out) == (ExitCode.UNKNOWN_JOB, "1\n")
        assert shown.err.startswith("tidemill: there is no dead letter ghost in queue test/")
        assert [letter.job_id for letter in client.dead_letters()] == ["a"]


class TestErrors:
    def test_a_queue_without_any_says_so(self, tidemill: Run, queue: str) -> None:
        shown = tidemill("dead", "list")
        assert shown == Outcome(ExitCode.OK, "", f"tidemill: there are no dead letters in queue {queue}\n")
        assert tidemill("dead", "list", "--json") == Outcome(ExitCode.OK, "", "")

    @pytest.mark.parametrize("action", ["show", "requeue", "purge"])
    def test_an_unknown_id_is_one_line(self, tidemill: Run, action: str) -> None:
        shown = tidemill("dead", action, "ghost")
        assert (shown.code, shown.err.count("\n")) == (ExitCode.UNKNOWN_JOB, 1)
        assert shown.err.startswith("tidemill: there is no dead letter ghost in queue test/")

    @pytest.mark.parametrize("action", ["requeue", "purge"])
    @pytest.mark.parametrize("arguments", [[], ["a", "--all"]])
    def test_either_ids_or_all(self, tidemill: Run, action: str, arguments: list[str]) -> None:
        shown = tidemill("dead", action, *arguments)
        assert (shown.code, shown.out) == (ExitCode.USAGE, "")
        assert "give either the ids of some, or --all" in shown.err

    @pytest.mark.parametrize("arguments", [["list"], ["show", "a"], ["requeue", "a"], ["purge", "--all"]])
    def test_redis_down_is_one_line_without_the_password(self, tidemill: Run, arguments: list[str]) -> None:
        shown = tidemill("dead", *arguments, "--redis-url", "redis://:hunter2@127.0.0.1:1/0")
        assert (shown.code, shown.out, shown.err.count("\n")) == (ExitCode.UNAVAILABLE, "", 1)
        assert "hunter2" not in shown.err
