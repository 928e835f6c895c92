"""What a job's answer must be: the same engine, called directly, with no queue and no other process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.worker.factories import make_claim
from tidemill.jobs import Choice, Job, JobId, Result, TokenLogprobs
from tidemill_worker.admission import Admission
from tidemill_worker.answers import Answers
from tidemill_worker.app import build_model
from tidemill_worker.held import HeldJobs
from tidemill_worker.request import Request
from tidemill_worker.settings import load_settings


@dataclass(frozen=True)
class Answer:
    """What of a result depends on the job alone."""

    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None

    @classmethod
    def of(cls, result: Result) -> Answer:
        return cls(result.choices, result.prompt_logprobs)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids


class Oracle:
    """Small batches and chunks, no prefix cache: nothing as in the workers but the bits."""

    def __init__(self, folder: Path, model_name: str) -> None:
        settings = load_settings(
            {
                "model": str(folder),
                "served_model_name": model_name,
                "threads": 1,
                "max_num_seqs": 12,
                "max_num_batched_tokens": 100,
                "kv_cache_memory": 0.2,
                "enable_prefix_caching": False,
            }
        )
        model = build_model(settings)
        self.tokenizer = model.tokenizer
        self.limits = model.limits
        self._engine = model.engine
        self._admission = Admission(
            model.tokenizer, model.grammars, model.limits, Answers(model=model_name, worker="oracle")
        )

    def answers(self, jobs: Iterable[Job]) -> dict[JobId, Answer]:
        """The answer to each; jobs that draw must name their seed."""
        held = HeldJobs()
        for job in jobs:
            assert job.params.seed is not None or job.params.temperature == 0
            claim = make_claim(job)
            one = self._admission.hold(claim)
            held.hold(one)
            prepared = self._admission.prepare(claim, one)
            assert isinstance(prepared, Request), prepared
            self._engine.add(prepared)
        answers = {}
        while self._engine.has_unfinished:
            for one, output in held.record(self._engine.step()):
                if output.finished:
                    answers[one.id] = Answer.of(self._admission.answers.generated(one, output))
        return answers
