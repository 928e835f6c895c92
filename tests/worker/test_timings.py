"""The timings of a result, from the claim to the last token, by a clock that only the model moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.worker.factories import MODEL, make_admission, make_claim, make_job, make_limits
from tests.worker.scripted import Step
from tidemill.jobs import Result, Timings
from tidemill_scheduler import RestoreCosts, Scheduler, SchedulerConfig, SequenceId, StepPlan
from tidemill_worker.answers import Answers
from tidemill_worker.engine import Engine
from tidemill_worker.generation import Generation
from tidemill_worker.held import HeldJob
from tidemill_worker.request import Request

TOKEN = 70


@dataclass
class Time:
    """Seconds since the test began."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SlowRunner:
    """Takes a second for each token that it computes."""

    time: Time
    costs: RestoreCosts = field(default_factory=RestoreCosts)

    def run(self, plan: StepPlan, generations: Mapping[SequenceId, Generation]) -> Step:
        self.time.now += plan.num_tokens
        return Step({row.sequence: TOKEN for row in plan.rows if row.sample})


def test_each_second_of_a_job_is_in_one_stage() -> None:
    """Given two jobs of four prompt tokens and one place, taken in chunks of three, when both run, then
    the first waits for nobody, and the second for the first."""
    time = Time()
    config = SchedulerConfig(
        num_blocks=16, block_size=4, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=3,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine(SlowRunner(time), Scheduler(config), frozenset(), clock=time)
    admission = make_admission(limits=make_limits(end_of_text=()), clock=time)
    held: dict[str, HeldJob] = {}
    for submitted_ms in (1_000, 3_000):
        claim = make_claim(
            make_job(None, prompt_token_ids=[5, 6, 7, 8], params={"max_tokens": 3}),
            submitted_ms=submitted_ms,
            claimed_ms=3_500,
        )
        job = admission.hold(claim)
        held[job.request_id] = job
        request = admission.prepare(claim, job)
        assert isinstance(request, Request)
        engine.add(request)

    results: list[Result] = []
    while engine.has_unfinished:
        outputs = [output for output in engine.step() if output.finished]
        results += [
            Answers(model=MODEL, worker="w1").generated(held[output.request_id], output) for output in outputs
        ]

    first = Timings(queued=2.5, waiting=0.0, prefill=4.0, decode=2.0)
    assert [result.timings for result in results] == [
        first,
        Timings(queued=0.5, waiting=6.0, prefill=4.0, decode=2.0),
    ]
