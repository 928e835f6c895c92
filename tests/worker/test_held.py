"""What the worker knows of the jobs it holds: checkpoints without gap or repeat, one ending each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.worker.factories import make_delta, make_held, make_output
from tidemill.jobs import Delta, FinishReason
from tidemill_worker.held import HeldJob, HeldJobs


def holding(*jobs: HeldJob) -> HeldJobs:
    held = HeldJobs()
    for job in jobs:
        held.hold(job)
    return held


@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["confirm", "lose reply", "no"]))
    )
)
def test_checkpoints_add_up_however_replies_are_lost(steps: list[tuple[list[int], str]]) -> None:
    """Given a queue that drops what it has by index, when replies get lost, then nothing is missing or
    twice."""
    job = make_held()
    stored: list[Delta] = []
    for token_ids, fate in steps:
        for token_id in token_ids:
            job.extend([token_id], f"{token_id};")
        if fate == "no":
            continue
        deltas = job.checkpoint()
        have = sum(len(delta.token_ids) for delta in stored)
        stored += [delta for delta in deltas if delta.index >= have]
        if fate == "confirm":
            job.confirm(deltas)
    have = sum(len(delta.token_ids) for delta in stored)
    stored += [delta for delta in job.checkpoint() if delta.index >= have]
    tokens = [token for delta in stored for token in delta.token_ids]
    assert tokens == job.token_ids
    assert "".join(delta.text for delta in stored) == job.text == "".join(f"{t};" for t in tokens)


def test_a_resumed_job_sends_only_what_is_new() -> None:
    job = make_held()
    job.resume([1, 2, 3], "abc")
    assert (job.checkpoint(), job.has_news) == ((), False)
    job.extend([4], "d")
    assert job.has_news
    assert job.checkpoint() == (make_delta(3, 4, text="d"),)
    assert job.text == "abcd"


def test_a_job_ends_once() -> None:
    job = make_held()
    held = holding(job)
    assert held.end(job.request_id) is job
    assert held.end(job.request_id) is None
    late = make_output(job.request_id, 5, finish_reason=FinishReason.STOP)
    assert held.record([late]) == []
    assert job.token_ids == []


def test_a_finished_job_cannot_be_cancelled() -> None:
    job = make_held()
    held = holding(job)
    last = make_output(job.request_id, 5, text="x", finish_reason=FinishReason.STOP)
    assert held.record([last]) == [(job, last)]
    assert held.end(job.request_id) is None


def test_ended_jobs_keep_their_lease_until_recorded() -> None:
    job = make_held()
    held = holding(job)
    held.end(job.request_id)
    assert (held.num_live, held.num_unrecorded) == (0, 1)
    assert [renewal.job_id for renewal in held.renewals(everything=True)] == ["job"]
    assert held.live_renewals() == []
    held.forget(job.request_id)
    assert held.renewals(everything=True) == []


def test_only_streamed_jobs_with_news_are_renewed_early() -> None:
    quiet, plain, streamed = make_held("quiet", stream=True), make_held("plain"), make_held("s", stream=True)
    held = holding(quiet, plain, streamed)
    held.record([make_output(plain.request_id, 1), make_output(streamed.request_id, 1)])
    early = held.renewals(everything=False)
    assert [renewal.job_id for renewal in early] == ["s"]
    held.confirm(early)
    assert held.renewals(everything=False) == []
    assert len(held.renewals(everything=True)) == 3


def test_a_job_claimed_again_supersedes_the_old_attempt() -> None:
    """Nothing of the lost attempt reaches the new one: no token, no confirmation, no ending."""
    old, new = make_held(), make_held(attempt=2)
    held = holding(old)
    held.record([make_output(old.request_id, 1)])
    [old_renewal] = held.renewals(everything=True)
    assert held.hold(new) == [old]
    assert old.ended
    assert held.record([make_output(old.request_id, 2)]) == []
    held.record([make_output(new.request_id, 9)])
    held.confirm([old_renewal])
    assert held.end(old.request_id) is None
    [renewal] = held.renewals(everything=True)
    assert (renewal.attempt, renewal.deltas) == (2, (make_delta(0, 9),))


def test_deadlines_end_live_jobs_only() -> None:
    early, late, ended = (make_held(name, deadline=at) for name, at in (("a", 5.0), ("b", 9.0), ("c", 1.0)))
    held = holding(early, late, ended, make_held("d"))
    held.end(ended.request_id)
    assert held.overdue(5.0) == [early.request_id]
