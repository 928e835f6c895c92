"""What the worker's tests build: tokenizers, jobs, claims, an engine without a model, a whole worker."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from tests.worker.reports import make_card, make_report
from tests.worker.scripted import Ranked, ranked
from tidemill.client import Client
from tidemill.connection import connect
from tidemill.errors import InvalidJob
from tidemill.jobs import Delta, Job, JobId, Message
from tidemill.moves import Claimed, QueueSettings
from tidemill.queue import Queue
from tidemill_worker.admission import Admission, ModelLimits
from tidemill_worker.answers import Answers
from tidemill_worker.engine import EngineStats, StepOutput
from tidemill_worker.engine_thread import SteppedEngine
from tidemill_worker.generation import Marks
from tidemill_worker.grammar import GrammarCompiler
from tidemill_worker.held import HeldJob
from tidemill_worker.leases import OpenQueue
from tidemill_worker.metrics import Metrics
from tidemill_worker.request import OpenChoice, Request, ending_after
from tidemill_worker.service import Service, ServiceConfig
from tidemill_worker.tokenizer import Tokenizer

MODEL = "tiny"
BOS, EOS = "<bos>", "<eos>"
TRAINING_TEXT = (
    "The tide turns the mill, and the mill grinds the corn.",
    "Žluťoučký kůň úpěl ďábelské ódy. 水車は潮で回る。 🌊🌊 naïve café",
    "def step(self):\n    plan = self.schedule()\n    return self.run(plan)\n",
)


def byte_level_backend(*, adds_bos: bool = False) -> RustTokenizer:
    """A small byte-level BPE tokenizer, the kind of GPT-2, Llama 3, Qwen and SmolLM."""
    backend = RustTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("  ", special=False)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return backend


def byte_fallback_backend() -> RustTokenizer:
    """The kind of Llama 2 and Mistral: words with a space mark, and tokens for single bytes."""
    words = ["▁", "▁the", "▁tide", "▁mill", "s", "t", "é", "▁é", ".", "\n", "�"]
    tokens = [BOS, EOS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = RustTokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.add_special_tokens([BOS, EOS, "<unk>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def render_chat(messages: Sequence[Message]) -> str:
    """A chat template: begins with BOS, opens the assistant's turn."""
    turns = "".join(f"[{message.role}] {message.content}\n" for message in messages)
    return f"{BOS}{turns}[assistant] "


def make_tokenizer(*, adds_bos: bool = False, chat: bool = True) -> Tokenizer:
    return Tokenizer(byte_level_backend(adds_bos=adds_bos), render=render_chat if chat else None)


def make_limits(**changes: Any) -> ModelLimits:
    values = {"model_name": MODEL, "max_model_len": 64, "max_total_tokens": 1000, "end_of_text": {1}}
    values.update(changes)
    values["end_of_text"] = frozenset(values["end_of_text"])
    return ModelLimits(**values)


def make_admission(
    *,
    tokenizer: Tokenizer | None = None,
    limits: ModelLimits | None = None,
    clock: Callable[[], float] | None = None,
    worker: str = "w1",
) -> Admission:
    extra = {} if clock is None else {"clock": clock}
    tokenizer, limits = tokenizer or make_tokenizer(), limits or make_limits()
    grammars = GrammarCompiler(tokenizer, limits.end_of_text)
    return Admission(tokenizer, grammars, limits, Answers(model=MODEL, worker=worker), **extra)


def make_job(prompt: str | None = "The tide", **changes: Any) -> Job:
    params = {"max_tokens": 8, "temperature": 0.0, **changes.pop("params", {})}
    return Job.parse({"prompt": prompt, "params": params, **changes})


def make_claim(job: Job | bytes | None = None, **changes: Any) -> Claimed:
    job = make_job() if job is None else job
    values: dict[str, Any] = {
        "job_id": JobId("broken") if isinstance(job, bytes) else job.id,
        "payload": job if isinstance(job, bytes) else job.to_wire().encode(),
        "seed": 7,
        "attempt": 1,
        "failures": 0,
        "submitted_ms": 1_000,
        "claimed_ms": 3_500,
        "deadline_ms": None,
        "checkpoint": (),
        "stream": False if isinstance(job, bytes) else job.stream,
    }
    return Claimed(**{**values, **changes})


def token_text(token_id: int) -> tuple[str, tuple[int, ...] | None]:
    """What tokens say where none is decoded: odd ones are no character by themselves."""
    return (f"<{token_id}>", None) if token_id % 2 == 0 else ("\ufffd", (token_id,))


def make_held(name: str = "job", *, params: dict[str, Any] | None = None, **changes: Any) -> HeldJob:
    """A job just claimed; one that is decoded already if its `params` are given."""
    values: dict[str, Any] = {"id": JobId(name), "attempt": 1, "stream": False, "claimed": 0.0}
    if params is not None:
        values["job"] = make_job(params={"temperature": 1.0, **params})
    return HeldJob(**{**values, "token_text": token_text, **changes})


def make_delta(index: int, *token_ids: int, text: str = "", **changes: Any) -> Delta:
    return Delta(index=index, token_ids=token_ids, text=text, **changes)


MARKS = Marks(added=0.0, scheduled=0.0, first_token=0.0, finished=0.0)


def make_output(
    request_id: str, *token_ids: int, text: str = "", num_top: int | None = None, **changes: Any
) -> StepOutput:
    """What a step brought; with `num_top`, each token's logprobs too."""
    entries = () if num_top is None else tuple(ranked(token, num_top) for token in token_ids)
    return StepOutput(request_id, token_ids, text, **({"logprobs": entries} | changes))


def make_stats(**changes: Any) -> EngineStats:
    values: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    return EngineStats(**{**values, **changes})


def ramp(prompt: Sequence[int], choice: int = 0, position: int = 0) -> Iterator[int]:
    """What the fake model says: tokens that depend on prompt, choice and position alone."""
    start = sum(prompt) % 50 + 13 * choice
    while True:
        yield 70 + (start + 7 * position) % 180
        position += 1


@dataclass
class Ramp:
    """One generation of the fake engine."""

    request: Request
    choice: OpenChoice

    def __post_init__(self) -> None:
        self.num_tokens = len(self.choice.output_token_ids)
        self._model = ramp(self.request.prompt_token_ids, self.choice.index, self.num_tokens)

    def advance(self) -> StepOutput:
        """Its next token. There is no end of text here; it ends at stops and at `max_tokens`."""
        token = next(self._model)
        self.num_tokens += 1
        ending = ending_after(token, self.num_tokens, self.request.params, frozenset(), self.choice)
        text = self.choice.output_text.take()
        if ending is not None:
            text += self.choice.output_text.close()
        return StepOutput(
            self.request.id,
            (token,),
            text,
            self.choice.index,
            self._logprobs(token),
            ending and ending.finish_reason,
            ending and ending.stop_reason,
        )

    def _logprobs(self, token: int) -> tuple[Ranked, ...]:
        wanted = self.request.params.logprobs
        return () if wanted is None else (ranked(token, wanted),)


@dataclass
class FakeEngine:
    """An engine without a model: each step brings each generation one token.

    If paced, its steps bring tokens only as often as that is allowed; a poisoned token in a prompt
    makes the step raise.
    """

    max_prompt: int = 10_000
    poison: int | None = None
    paced: bool = False
    aborted: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    _running: dict[str, list[Ramp]] = field(default_factory=dict)
    checks: int = 0
    most_at_once: int = 0
    _generated: int = 0
    _steps: int = 0
    _allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def allow(self, steps: int) -> None:
        """Let a paced engine make so many steps more."""
        self._allowed.release(steps)

    def free(self) -> None:
        """Pace it no longer."""
        self.paced = False

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def add(self, request: Request) -> None:
        if len(request.prompt_token_ids) > self.max_prompt:
            raise InvalidJob("prompt: too large for the cache", field="prompt", limit=self.max_prompt)
        if request.id in self._running:
            raise AssertionError(f"{request.id} was added twice")
        self.seen.append(request.id)
        self._running[request.id] = [Ramp(request, choice) for choice in request.choices]
        self.most_at_once = max(self.most_at_once, len(self._running))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._running.pop(request_id, None)

    def step(self) -> list[StepOutput]:
        if self.paced and not self._allowed.acquire(timeout=0.01):
            return []
        self._steps += 1
        running = [ramp for ramps in self._running.values() for ramp in ramps]
        return [self._advance(ramp) for ramp in running]

    def _advance(self, ramp: Ramp) -> StepOutput:
        request = ramp.request
        if self.poison is not None and self.poison in request.prompt_token_ids:
            raise RuntimeError("the model broke")
        output = ramp.advance()
        self._generated += 1
        if output.finish_reason is None:
            return output
        self._running[request.id].remove(ramp)
        if self._running[request.id]:
            return output
        del self._running[request.id]
        wanted = request.params.prompt_logprobs
        scored = () if wanted is None else request.prompt_token_ids[1:]
        return replace(
            output,
            marks=MARKS,
            prompt_logprobs=None if wanted is None else tuple(ranked(token, wanted) for token in scored),
        )

    def stats(self) -> EngineStats:
        return make_stats(
            num_running=len(self._running), generation_tokens=self._generated, num_steps=self._steps
        )

    def check_integrity(self) -> None:
        assert not self._running
        self.checks += 1


def expected_tokens(job: Job, count: int, choice: int = 0) -> tuple[int, ...]:
    """What the fake engine generates for `job`, undisturbed."""
    prompt = make_tokenizer().prompt_token_ids(job)
    return tuple(itertools.islice(ramp(prompt, choice), count))


@dataclass(frozen=True)
class Place:
    """Where a test's jobs go."""

    url: str
    queue: str

    def client(self) -> Client:
        return Client(self.url, queue=self.queue)


def opener(place: Place, *, lease: float = 30.0, max_attempts: int = 3) -> OpenQueue:
    settings = QueueSettings(lease=lease, max_attempts=max_attempts, backoff=0.05)

    @asynccontextmanager
    async def open_queue() -> AsyncIterator[Queue]:
        redis = connect(place.url, max_connections=12)
        opened = Queue(redis, place.queue, settings)
        try:
            yield opened
        finally:
            await opened.aclose()
            await redis.aclose()

    return open_queue


class FreeableEngine(SteppedEngine, Protocol):
    """An engine that a test may hold up."""

    def free(self) -> None:
        """Hold it up no longer."""


@dataclass
class RunningWorker:
    """A service in this process, on a real queue, with an engine that has no model."""

    service: Service
    metrics: Metrics
    task: asyncio.Task[bool]

    async def stop(self, *, at_once: bool = False) -> bool:
        self.service.request_stop()
        if at_once:
            self.service.request_stop()
        return await asyncio.wait_for(self.task, 20)


@asynccontextmanager
async def running_worker(
    place: Place,
    *,
    name: str = "w1",
    engine: FreeableEngine | None = None,
    capacity: int = 8,
    claim_ahead: int = 0,
    lease: float = 30.0,
    renewal: float = 0.1,
    grace_period: float = 10.0,
    limits: ModelLimits | None = None,
    fingerprint: str = "f1",
    max_attempts: int = 3,
) -> AsyncIterator[RunningWorker]:
    engine = engine or FakeEngine()
    limits = limits or make_limits()
    metrics = Metrics(MODEL)
    service = Service(
        ServiceConfig(
            capacity=capacity,
            claim_ahead=claim_ahead,
            lease=lease,
            renewal=renewal,
            stream_interval=0.02,
            grace_period=grace_period,
        ),
        engine=engine,
        admission=make_admission(limits=limits, worker=name),
        card=make_card(limits),
        report=make_report(name=name, queue=place.queue, fingerprint=fingerprint, capacity=capacity),
        open_queue=opener(place, lease=lease, max_attempts=max_attempts),
        observer=metrics,
    )
    metrics.watch(lambda: service.engine.stats, has_swap_space=False)
    metrics.watch_service(service.stats)
    worker = RunningWorker(service, metrics, asyncio.create_task(service.run()))
    try:
        yield worker
    finally:
        engine.free()
        if not worker.task.done():
            await worker.stop(at_once=True)


async def eventually(condition: Callable[[], object], *, timeout: float = 10.0) -> None:
    """Return once `condition` holds; it is looked at between turns of the event loop."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
