"""What `queue_moves.py` measures has the names that are promised, and says what it means."""

from __future__ import annotations

from pathlib import Path

import pytest
from measure import Run
from queue_load import LEASES, PROMPT_CHARACTERS, Bench, Standing, standing
from queue_moves import LINES, Figures, add_standing, measure_moves, print_table
from servers import running

from tidemill.jobs import Job
from tidemill.keys import QueueKeys

COUNT = LEASES + 100
KEYS = QueueKeys("round")


def make_standing(waiting: int) -> Standing:
    return Standing(waiting, bytes_in_all=3.0, bytes_beyond_payload=1.0, claim_ms=0.2, depth_ms=0.1)


def test_a_figure_is_the_median_of_its_values() -> None:
    figures = Figures()
    for value, foreign in ((3.0, 0.0), (1.0, 0.5), (2.0, 0.1)):
        figures.add("claim_ms", value, Run(1.0, foreign))
    (measured,) = figures.all
    assert figures.medians == {"claim_ms": 2.0}
    assert measured.foreign == 0.5


async def test_a_rate_is_things_per_second() -> None:
    async def nothing() -> None:
        """It takes some microseconds."""

    figures = Figures()
    await figures.rate("submit_per_s", 1000, nothing())
    assert figures.medians["submit_per_s"] > 1000


def test_memory_is_told_of_the_longest_line() -> None:
    figures = Figures()
    for waiting in LINES:
        add_standing(figures, make_standing(waiting), Run(), "_redis")
    assert figures.medians == {
        "claim_ms_1000_redis": 0.2,
        "depth_ms_1000_redis": 0.1,
        "claim_ms_100000_redis": 0.2,
        "depth_ms_100000_redis": 0.1,
        "bytes_per_waiting_job_redis": 1.0,
        "bytes_per_waiting_job_with_payload_redis": 3.0,
    }


def test_the_table_has_every_name_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    figures = Figures()
    figures.add("bytes_per_waiting_job_with_payload_redis", 2341.76, Run(1.0, 0.02))
    figures.add("claim_ms_1000", 0.2604, Run(1.0, 0.02))
    print_table(figures.all)
    out = capsys.readouterr().out
    assert "bytes_per_waiting_job_with_payload_redis" in out
    assert "2,342" in out
    assert "0.260" in out


async def test_a_round_measures_every_move_and_leaves_no_job(tmp_path: Path) -> None:
    figures = Figures()
    with running("valkey", tmp_path) as server:
        async with Bench.on(server, "round") as bench:
            await measure_moves(bench, COUNT, figures, "")
            with server.client() as client:
                assert client.hlen(KEYS.load) == 0
                assert client.xlen(client.keys(KEYS.results("*"))[0]) == COUNT + COUNT // 10
    assert list(figures.medians) == [
        "submit_one_by_one_per_s",
        "submit_per_s",
        "claim_per_s",
        "renew_500_ms",
        "finish_per_s",
    ]
    assert min(figures.medians.values()) > 0


async def test_a_waiting_job_takes_its_payload_and_some_more(tmp_path: Path) -> None:
    with running("valkey", tmp_path) as server:
        async with Bench.on(server, "line") as bench:
            line = await standing(bench, 500, repeats=3)
    assert line.bytes_in_all - line.bytes_beyond_payload > PROMPT_CHARACTERS
    assert 100 < line.bytes_beyond_payload < 5000
    assert line.claim_ms > 0
    assert line.depth_ms > 0


async def test_each_queue_begins_on_an_empty_server(tmp_path: Path) -> None:
    with running("valkey", tmp_path) as server:
        for name in ("first", "second"):
            async with Bench.on(server, name) as bench:
                await bench.submit_many(bench.make_jobs(3))
        with server.client() as client:
            assert client.keys(f"{QueueKeys('first').prefix}*") == []
            assert client.keys(f"{QueueKeys('second').prefix}*") != []


async def test_jobs_differ_are_realistic_and_can_be_submitted(tmp_path: Path) -> None:
    with running("valkey", tmp_path) as server:
        async with Bench.on(server, "jobs") as bench:
            jobs = bench.make_jobs(50, start=7)
    assert len({job.id for job in jobs}) == 50
    assert len({job.prompt for job in jobs}) == 50
    assert jobs[0].id == "document-000000007"
    assert all(Job.from_wire(job.to_wire()) == job for job in jobs)
