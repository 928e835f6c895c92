"""What the worker knows of the jobs it holds: checkpoints without gap or repeat, one ending each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.factories import MARKS, make_delta, make_held, make_output, token_text
from tests.worker.scripted import Ranked
from tidemill.jobs import Delta, FinishReason, JobId, Logprob, TokenLogprobs
from tidemill_worker.engine import StepOutput
from tidemill_worker.held import HeldJob, HeldJobs
from tidemill_worker.request import Ending
from tidemill_worker.token_logprobs import on_wire


def holding(*jobs: HeldJob) -> HeldJobs:
    held = HeldJobs()
    for job in jobs:
        held.hold(job)
    return held


@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=5),
            st.sampled_from(["confirm", "lose reply", "no"]),
        )
    )
)
def test_checkpoints_add_up_however_replies_are_lost(steps: list[tuple[list[tuple[int, int]], str]]) -> None:
    """Given a queue that drops what it has by index, when replies get lost, then nothing is missing or
    twice, of any of the generations."""
    job = make_held(params={"n": 3, "logprobs": 1})
    stored: list[Delta] = []

    def store(deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            have = sum(len(delta.token_ids) for delta in stored)
            assert delta.index <= have  # else the queue would see a gap
            if delta.index == have:
                stored.append(delta)

    for drawn, fate in steps:
        for choice, token_id in drawn:
            job.take_in(make_output(job.request_id, token_id, choice=choice, text=f"{token_id};", num_top=1))
        if fate != "no":
            deltas = job.checkpoint()
            store(deltas)
            if fate == "confirm":
                job.confirm(deltas)
    store(job.checkpoint(everything=True))
    for choice in job.choices:
        own = [delta for delta in stored if delta.choice == choice.index]
        assert [token for delta in own for token in delta.token_ids] == choice.token_ids
        assert "".join(delta.text for delta in own) == choice.text
        assert choice.text == "".join(f"{token};" for token in choice.token_ids)
        said = on_wire(choice.logprobs, token_text)
        assert tuple(entry for delta in own for entry in delta.logprobs) == said
        assert [entry.token_id for entry in said] == choice.token_ids


def test_however_long_redis_is_away_little_waits_for_it() -> None:
    """Given a streamed job whose checkpoints find nobody, then what is new becomes one piece of each
    generation, and the piece whose fate is unknown stays what it is."""
    job = make_held(params={"n": 2}, stream=True)
    held = holding(job)

    def step(token: int) -> None:
        held.record([make_output(job.request_id, token, choice=choice, text="x") for choice in (0, 1)])

    step(0)
    [first] = held.renewals(everything=False)
    for token in range(1, 1000):
        step(token)
        assert held.renewals(everything=False) == [first]
    last_word = held.live_renewals()
    assert [len(renewal.deltas) for renewal in last_word] == [4]
    held.confirm([first])
    [rest] = held.renewals(everything=False)
    assert (first.deltas + rest.deltas, len(rest.deltas)) == (last_word[0].deltas, 2)
    assert [len(delta.token_ids) for delta in rest.deltas] == [999, 999]


def test_a_resumed_job_sends_only_what_is_new() -> None:
    job = make_held()
    job.resume(0, [1, 2, 3], "abc")
    assert (job.checkpoint(), job.has_news) == ((), False)
    job.take_in(make_output(job.request_id, 4, text="d"))
    assert job.has_news
    assert job.checkpoint() == (make_delta(3, 4, text="d"),)
    assert job.choice(0).text == "abcd"


def test_resumed_generations_go_on_where_each_of_them_was() -> None:
    """Given three, one of them ended and one not begun, then new tokens follow on what all have stored."""
    job = make_held(params={"n": 3})
    job.resume(0, [1, 2], "ab", ending=Ending(FinishReason.STOP, "c"))
    job.resume(1, [3], "c")
    job.resume(2, [], "")
    assert (job.checkpoint(), job.has_news) == ((), False)
    job.take_in(make_output(job.request_id, 5, choice=2, text="e"))
    job.take_in(make_output(job.request_id, 4, choice=1, text="d"))
    assert job.checkpoint() == (make_delta(3, 4, text="d", choice=1), make_delta(4, 5, text="e", choice=2))
    assert [choice.text for choice in job.choices] == ["ab", "cd", "e"]
    assert [choice.ending for choice in job.choices] == [Ending(FinishReason.STOP, "c"), None, None]


def test_logprobs_of_an_earlier_attempt_are_the_same_to_the_last_bit() -> None:
    first = make_held(params={"logprobs": 2})
    for token in (3, 4, 5):
        entry = Ranked(token, -1 / 3 * token, 2, ((token + 1, -0.1), (token, -1 / 3 * token)))
        first.take_in(StepOutput(first.request_id, (token,), "x", logprobs=(entry,)))
    stored = tuple(Delta.from_wire(delta.to_wire()) for delta in first.checkpoint())
    second = make_held(params={"logprobs": 2}, attempt=2)
    second.resume(0, [3, 4, 5], "xxx", [entry for delta in stored for entry in delta.logprobs])
    resumed, undisturbed = (on_wire(job.choice(0).logprobs, token_text) for job in (second, first))
    assert resumed == undisturbed


def test_a_token_is_named_by_its_text_and_bytes() -> None:
    job = make_held(params={"logprobs": 2})
    entry = Ranked(8, -0.5, 2, ((7, -0.25), (8, -0.5)))
    job.take_in(StepOutput(job.request_id, (8,), "x", logprobs=(entry,)))
    [delta] = job.checkpoint()
    assert delta.logprobs == (
        TokenLogprobs(
            token_id=8,
            logprob=-0.5,
            rank=2,
            token="<8>",
            top=(
                Logprob(token_id=7, logprob=-0.25, rank=1, token="\ufffd", bytes=(7,)),
                Logprob(token_id=8, logprob=-0.5, rank=2, token="<8>"),
            ),
        ),
    )


@pytest.mark.parametrize("impossible", [-math.inf, math.nan, -1e30])
def test_an_impossible_token_is_a_number_that_json_can_say(impossible: float) -> None:
    [entry] = on_wire([Ranked(8, impossible, 9, ((7, 0.0), (8, impossible)))], token_text)
    assert (entry.logprob, [likely.logprob for likely in entry.top]) == (-9999.0, [0.0, -9999.0])
    assert TokenLogprobs.from_wire(entry.to_wire()) == entry


def test_an_echoed_prompt_is_stored_with_the_first_token() -> None:
    """Given a fresh job whose text begins with the prompt's, then those who stream it get that too."""
    job = make_held()
    job.resume(0, [], "the prompt")
    assert job.checkpoint() == ()
    job.take_in(make_output(job.request_id, 1, text=" a"))
    assert job.checkpoint() == (make_delta(0, 1, text="the prompt a"),)


def test_a_renewal_amid_a_resumption_sends_nothing() -> None:
    """The lease thread does not wait for the preparation of a job that it renews already."""
    job = make_held(params={"n": 2})

    class Watched(list[int]):
        def __iter__(self) -> Iterator[int]:
            for token_id in super().__iter__():
                yield token_id
                assert (job.checkpoint(), job.has_news) == ((), False)

    job.resume(0, Watched([1, 2]), "ab")
    job.resume(1, Watched([3]), "c")
    assert (job.checkpoint(), job.has_news) == ((), False)


def test_a_generation_ends_before_its_job() -> None:
    job = make_held(params={"n": 2})
    held = holding(job)
    assert held.num_generations == 2
    held.record([make_output(job.request_id, 5, choice=1, finish_reason=FinishReason.LENGTH)])
    assert (job.ended, held.num_live, held.num_generations) == (False, 1, 1)
    held.record([make_output(job.request_id, 6, finish_reason=FinishReason.STOP, marks=MARKS)])
    assert (job.ended, held.num_live, held.num_generations) == (True, 0, 0)
    assert [choice.ending and choice.ending.finish_reason for choice in job.choices] == ["stop", "length"]


def test_a_job_ends_once() -> None:
    job = make_held()
    held = holding(job)
    assert held.end(job.request_id) is job
    assert held.end(job.request_id) is None
    late = make_output(job.request_id, 5, finish_reason=FinishReason.STOP, marks=MARKS)
    assert held.record([late]) == []
    assert (job.choice(0).token_ids, job.choice(0).ending) == ([], None)


def test_a_job_aside_is_not_ended_by_a_cancellation_but_kept_from_running() -> None:
    job, other = make_held(aside=True), make_held("other", aside=True)
    held = holding(job, other)
    assert held.cancel(job.request_id) is None
    assert (job.cancelled, job.ended, held.num_aside) == (True, False, 2)
    assert held.take_from_aside(job.request_id) is False
    assert held.take_from_aside(other.request_id) is True
    assert held.cancel(other.request_id) is other
    assert (other.ended, held.num_aside) == (True, 1)


def test_a_job_is_found_by_the_attempt_that_goes_on() -> None:
    held = holding(make_held(), make_held("other", ended=True))
    assert held.live_attempt(JobId("job")) == "job/1"
    assert held.live_attempt(JobId("other")) is None
    assert held.live_attempt(JobId("unknown")) is None


def test_a_finished_job_cannot_be_cancelled() -> None:
    job = make_held()
    held = holding(job)
    last = make_output(job.request_id, 5, text="x", finish_reason=FinishReason.STOP, marks=MARKS)
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


def test_an_old_attempt_that_has_ended_is_not_renewed_beside_the_new_one() -> None:
    """What is lost is said of a job: it would cost the new attempt its lease."""
    old, new = make_held(ended=True), make_held(attempt=2)
    held = holding(old)
    assert held.hold(new) == []
    assert [renewal.attempt for renewal in held.renewals(everything=True)] == [2]


def test_renewals_say_how_long_the_prompt_is() -> None:
    """Its tenant is charged for it with the first token, not only when the job has ended."""
    job = make_held()
    held = holding(job)
    [early] = held.renewals(everything=True)
    job.num_prompt_tokens = 7
    [late] = held.renewals(everything=True)

    assert (early.prompt_tokens, late.prompt_tokens) == (0, 7)
    assert [renewal.prompt_tokens for renewal in held.live_renewals()] == [7]
