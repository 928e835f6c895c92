"""What a job's answer must be: the same engine, called directly, with no queue and no other process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.worker.factories import make_claim
from tidemill.jobs import FinishReason, Job, JobId, Result
from tidemill_worker.admission import Admission
from tidemill_worker.answers import Answers
from tidemill_worker.app import build_model
from tidemill_worker.engine import Request
from tidemill_worker.settings import load_settings


@dataclass(frozen=True)
class Answer:
    """What of a result depends on the job alone."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None

    @classmethod
    def of(cls, result: Result) -> Answer:
        return cls(result.text, result.token_ids, result.finish_reason, result.stop_reason)


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
        self._admission = Admission(model.tokenizer, model.limits, Answers(model=model_name, worker="oracle"))

    def answers(self, jobs: Iterable[Job]) -> dict[JobId, Answer]:
        """The answer to each; jobs that draw must name their seed."""
        requests = {}
        for job in jobs:
            assert job.params.seed is not None or job.params.temperature == 0
            claim = make_claim(job)
            prepared = self._admission.prepare(claim, self._admission.hold(claim))
            assert isinstance(prepared, Request), prepared
            self._engine.add(prepared)
            requests[prepared.id] = job.id
        return self._run(requests)

    def _run(self, requests: dict[str, JobId]) -> dict[JobId, Answer]:
        texts = dict.fromkeys(requests, "")
        tokens: dict[str, tuple[int, ...]] = dict.fromkeys(requests, ())
        answers = {}
        while self._engine.has_unfinished:
            for output in self._engine.step():
                texts[output.request_id] += output.text
                tokens[output.request_id] += output.token_ids
                if output.finished:
                    answers[requests[output.request_id]] = Answer(
                        texts[output.request_id],
                        tokens[output.request_id],
                        output.finish_reason,
                        output.stop_reason,
                    )
        return answers
