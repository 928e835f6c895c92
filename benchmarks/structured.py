"""JSON by schema against free text: the same prompts, the same number of tokens, the engine called directly.

    python benchmarks/structured.py [--quick] [--json PATH]

200 jobs ask SmolLM2 for JSON of ten schemas, and every text that ends is validated by another
implementation of JSON schema. Free text then generates, for each job, as many tokens as its JSON had.
Compiling a job's schema counts as part of its run; checking a new one, once, does not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from measure import Run, Series, benchmark_parser, print_series, report, timed
from workload import FLAGS

from tidemill import Job, SamplingParams
from tidemill.jobs import FinishReason
from tidemill_worker.app import ServedModel, build_model
from tidemill_worker.grammar import CompiledGrammar
from tidemill_worker.request import OpenChoice, Request
from tidemill_worker.settings import load_settings

MAX_TOKENS = 384

TEXT = {"type": "string", "minLength": 1, "maxLength": 40}
WORD = {"type": "string", "pattern": "^[A-Za-z][A-Za-z -]{1,19}$"}
NAME = {"type": "string", "minLength": 2, "maxLength": 30}
AMOUNT = {"type": "number", "minimum": 0, "maximum": 100000, "multipleOf": 0.25}


def record(optional: Sequence[str] = (), **properties: object) -> dict[str, Any]:
    """The schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def array(items: object, least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": record(
        ("email",), name=NAME, age=integer(0, 120), email={"type": ["string", "null"], "maxLength": 30}
    ),
    "an invoice": record(
        number={"type": "string", "pattern": "^INV-[0-9]{4,6}$"},
        date={"type": "string", "format": "date"},
        currency={"enum": ["EUR", "USD", "GBP"]},
        lines=array(record(item=WORD, quantity=integer(1, 99), price=AMOUNT), 1, 3),
        total=AMOUNT,
    ),
    "a recipe": record(
        ("vegan",),
        title=TEXT,
        minutes=integer(1, 240),
        ingredients=array(record(name=WORD, grams=integer(1, 2000)), 2, 4),
        vegan={"type": "boolean"},
    ),
    "a review of a film": record(
        title=TEXT,
        sentiment={"enum": ["positive", "negative", "mixed"]},
        stars=integer(1, 5),
        reasons=array(TEXT, 1, 2),
    ),
    "a 3 by 3 matrix": array(
        array({"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.125}, 3, 3), 3, 3
    ),
    "a weather report": record(
        ("warning",),
        city=WORD,
        celsius={"type": "number", "minimum": -60, "maximum": 60, "multipleOf": 0.5},
        sky={"enum": ["clear", "cloudy", "rain", "snow"]},
        wind={"$ref": "#/$defs/wind"},
        warning=TEXT,
    )
    | {"$defs": {"wind": record(direction={"enum": ["N", "E", "S", "W"]}, kmh=integer(0, 200))}},
    "a shape": {
        "oneOf": [
            record(kind={"const": "circle"}, radius=AMOUNT),
            record(kind={"const": "rectangle"}, width=AMOUNT, height=AMOUNT),
            record(kind={"const": "label"}, text=TEXT),
        ]
    },
    "a support ticket": record(
        id={"type": "string", "format": "uuid"},
        subject=TEXT,
        urgency=integer(1, 3),
        tags=array({"enum": ["billing", "login", "bug", "question"]}, 0, 2),
        assigned={"anyOf": [NAME, {"type": "null"}]},
    ),
    "a family tree": {
        "$ref": "#/$defs/person",
        "$defs": {
            "person": record(
                ("parents",),
                name=WORD,
                born=integer(1800, 2020),
                parents=array({"$ref": "#/$defs/parent"}, 0, 2),
            ),
            "parent": record(name=WORD, born=integer(1700, 2000)),
        },
    },
    "a quiz question": record(
        question=TEXT,
        answers=array(WORD, 3, 3),
        correct={"enum": [0, 1, 2]},
        level={
            "type": "array",
            "prefixItems": [{"enum": ["easy", "hard"]}, integer(1, 10)],
            "items": False,
            "minItems": 2,
        },
    ),
}
SUBJECTS = (
    "from Prague",
    "from 1987",
    "that is short",
    "for a child",
    "about the sea",
    "that is unusual",
    "for Monday",
)


@dataclass
class Task:
    """One job of the workload, and what became of it."""

    schema: dict[str, Any]
    prompt_token_ids: Sequence[int]
    grammar: CompiledGrammar
    token_ids: Sequence[int] = ()
    text: str = ""
    finish_reason: FinishReason | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is FinishReason.STOP

    @property
    def is_valid(self) -> bool:
        return Draft202012Validator(self.schema).is_valid(json.loads(self.text))


def main() -> None:
    arguments = benchmark_parser(__doc__, quick="20 jobs instead of 200").parse_args()
    served = build_model(load_settings(FLAGS))
    tasks = make_tasks(served, 20 if arguments.quick else 200)
    run(served, tasks[:10], free=True, max_tokens=4)
    series = take_turns(served, tasks)
    finished = [task for task in tasks if task.is_finished]
    valid = sum(task.is_valid for task in finished)
    print(f"{len(tasks)} jobs of {len(SCHEMAS)} schemas: {len(finished)} ended, {valid} of them valid")
    print_series("output tokens per second", list(series.values()))
    figures = {
        "structured_over_free": series["structured"].rate / series["free"].rate,
        "valid": valid / len(finished) if finished else 0.0,
        "finished": len(finished) / len(tasks),
        "mask_us_per_token": mask_microseconds(tasks),
        "structured_tokens_per_s": series["structured"].rate,
        "free_tokens_per_s": series["free"].rate,
    }
    served.grammars.close()
    settings = {**FLAGS, "jobs": len(tasks), "quick": arguments.quick}
    report(figures, settings=settings, path=arguments.json)


def make_tasks(served: ServedModel, count: int) -> list[Task]:
    """`count` jobs, the schemas in turn, each with another request."""
    tasks = []
    for index in range(count):
        thing, schema = list(SCHEMAS.items())[index % len(SCHEMAS)]
        request = f"Describe {thing} {SUBJECTS[index % len(SUBJECTS)]} in JSON. It is number {index}."
        params = {"structured_outputs": {"json": schema}}
        job = Job.parse({"messages": [{"role": "user", "content": request}], "params": params})
        assert job.params.structured_outputs is not None
        grammar = served.grammars.compile(job.params.structured_outputs)
        tasks.append(Task(schema, served.tokenizer.prompt_token_ids(job), grammar))
    return tasks


def take_turns(served: ServedModel, tasks: Sequence[Task]) -> dict[str, Series]:
    """Structured and free text forwards and backwards; the first run says how many tokens there are."""
    runs: dict[str, list[Run]] = {"structured": [], "free": []}
    for name in ("structured", "free", "free", "structured"):
        with timed() as measured:
            run(served, tasks, free=name == "free")
        runs[name].append(measured)
        tokens = sum(len(task.token_ids) for task in tasks)
        print(f"  {name}: {tokens} tokens, {tokens / measured.seconds:.1f} a second", flush=True)
    return {name: Series(name, tokens, measured) for name, measured in runs.items()}


def run(served: ServedModel, tasks: Sequence[Task], *, free: bool, max_tokens: int | None = None) -> None:
    """Generate for all tasks at once; what structured text becomes is kept in them."""
    engine, texts = served.engine, [""] * len(tasks)
    token_ids: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        limit = max_tokens or (len(task.token_ids) if free else MAX_TOKENS)
        params = SamplingParams(max_tokens=limit, temperature=0.7, ignore_eos=free)
        text = served.tokenizer.output_text(params, task.prompt_token_ids)
        choice = OpenChoice(0, text, None if free else task.grammar.start())
        engine.add(Request(str(index), task.prompt_token_ids, params, seed=index, choices=[choice]))
    while engine.has_unfinished:
        for output in engine.step():
            index = int(output.request_id)
            token_ids[index] += output.token_ids
            texts[index] += output.text
            if output.finish_reason is not None and not free:
                task = tasks[index]
                task.token_ids, task.text = tuple(token_ids[index]), texts[index]
                task.finish_reason = output.finish_reason


def mask_microseconds(tasks: Sequence[Task]) -> float:
    """Mean time from taking a token in to knowing what may follow it, with nothing else going on."""
    seconds, count = 0.0, 0
    for task in tasks[:40]:
        grammar = task.grammar.start()
        grammar.allowed_tokens()
        start = time.perf_counter()
        for token_id in task.token_ids[:-1]:
            grammar.accept(token_id)
            grammar.allowed_tokens()
        seconds += time.perf_counter() - start
        count += len(task.token_ids) - 1
    return seconds / count * 1e6


if __name__ == "__main__":
    main()
