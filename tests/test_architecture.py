"""The import table of `docs/architecture.md`, and the other rules of the tree that a machine can hold.

Every rule is checked against the real tree and against a made-up module that breaks it, so that no
rule can go blind unnoticed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = {
    "tidemill": ROOT / "tidemill",
    "tidemill_producer": ROOT / "producer" / "tidemill_producer",
    "tidemill_scheduler": ROOT / "scheduler" / "tidemill_scheduler",
    "tidemill_kernels": ROOT / "kernels" / "tidemill_kernels",
    "tidemill_worker": ROOT / "worker" / "tidemill_worker",
}
READMES = ("tidemill", "producer", "scheduler", "kernels", "worker", "benchmarks", "deploy")
ENGINE = tuple(f"tidemill_worker.{module}" for module in ("engine", "generation", "request", "deadlines"))
MAX_LINES = 400
SCREEN = 60
VAGUE_NAMES = frozenset({"common", "helper", "helpers", "misc", "util", "utils"})


@dataclass(frozen=True)
class Source:
    """One module: its dotted name and its text."""

    module: str
    text: str


@dataclass(frozen=True)
class Use:
    """Something a module refers to: an imported name, or an attribute of an imported module."""

    module: str
    target: str
    line: int
    in_function: bool
    is_import: bool = True

    def touches(self, *prefixes: str) -> bool:
        """Whether the target is one of these modules or lies inside one."""
        return within(self.target, *prefixes)


@dataclass(frozen=True)
class Rule:
    """`breaks` says whether a use, in a module inside one of `modules`, goes against the rule."""

    name: str
    modules: tuple[str, ...]
    breaks: Callable[[Use], bool]


def within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def is_stdlib(use: Use) -> bool:
    return use.target.partition(".")[0] in sys.stdlib_module_names


def only(*allowed: str) -> Callable[[Use], bool]:
    """Imports of the standard library and of `allowed`, and nothing else."""
    return lambda use: use.is_import and not is_stdlib(use) and not use.touches(*allowed)


def none_of(*forbidden: str) -> Callable[[Use], bool]:
    return lambda use: use.touches(*forbidden)


def in_command(use: Use) -> bool:
    """The command may name the components, and what draws on a terminal, but lazily."""
    return use.in_function and use.module == "tidemill.__main__"


def contract_imports(use: Use) -> bool:
    lazy = ("tidemill_producer", "tidemill_worker", "typer", "rich")
    return only("tidemill", "pydantic", "pydantic_core", "redis")(use) and not (
        in_command(use) and use.touches(*lazy)
    )


def reads_environment(use: Use) -> bool:
    return use.touches("os.environ", "os.environb", "os.getenv") and not use.module.endswith(".settings")


RULES = (
    Rule("the contract imports pydantic and redis; only its command names components, lazily",
         ("tidemill",), contract_imports),
    Rule("the producer imports no other component than the contract",
         ("tidemill_producer",), none_of("tidemill_worker", "tidemill_scheduler", "tidemill_kernels")),
    Rule("the producer needs no torch",
         ("tidemill_producer",), none_of("torch", "transformers", "triton", "numba", "safetensors")),
    Rule("the scheduler imports the standard library only",
         ("tidemill_scheduler",), only("tidemill_scheduler")),
    Rule("the scheduler has no clock, no randomness and no input or output",
         ("tidemill_scheduler",),
         none_of("time", "datetime", "random", "secrets", "uuid", "os", "pathlib", "socket", "threading")),
    Rule("the kernels import torch, triton, numba, numpy and llvmlite",
         ("tidemill_kernels",),
         only("tidemill_kernels", "torch", "triton", "numba", "numpy", "llvmlite")),
    Rule("the worker does not import the producer",
         ("tidemill_worker",), none_of("tidemill_producer")),
    Rule("the engine sees the scheduler and the contract, no tensors and no queue",
         ENGINE,
         only("tidemill.jobs", "tidemill.params", "tidemill.errors", "tidemill_scheduler", *ENGINE, "numpy")),
    Rule("the model sees nothing of the rest of the worker",
         ("tidemill_worker.model",),
         lambda use: use.touches("tidemill_worker") and not use.touches("tidemill_worker.model")),
    Rule("the model does not know the queue",
         ("tidemill_worker.model",), none_of("redis", "tidemill.queue", "tidemill.client")),
    Rule("imports are absolute",
         tuple(COMPONENTS), lambda use: use.target.startswith(".")),
    Rule("the environment is read in settings only",
         tuple(COMPONENTS), reads_environment),
    Rule("nothing is read in a format that can carry code",
         tuple(COMPONENTS), none_of("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")),
    Rule("templates are rendered by transformers, in its sandbox",
         tuple(COMPONENTS), none_of("jinja2")),
)  # fmt: skip

OFFENDERS = (
    ("the contract", Source("tidemill.queue", "import tidemill_worker")),
    ("the contract", Source("tidemill.queue", "def f():\n    import tidemill_producer.cli")),
    ("the contract", Source("tidemill.client", "from tokenizers import Tokenizer")),
    ("the contract", Source("tidemill.__main__", "from tidemill_producer import cli")),
    ("the contract", Source("tidemill.__main__", "def f():\n    import torch")),
    ("the producer imports", Source("tidemill_producer.cli", "def f():\n    import tidemill_worker.app")),
    ("the producer imports", Source("tidemill_producer.cli", "from tidemill_scheduler import plan")),
    ("the producer needs", Source("tidemill_producer.cli", "def f():\n    from torch import nn")),
    ("the producer needs", Source("tidemill_producer.cli", "if TYPE_CHECKING:\n    import transformers")),
    ("the scheduler imports", Source("tidemill_scheduler.policy", "import numpy as np")),
    ("the scheduler imports", Source("tidemill_scheduler.policy", "import tidemill.jobs")),
    ("the scheduler has", Source("tidemill_scheduler.policy", "from time import monotonic")),
    ("the scheduler has", Source("tidemill_scheduler.policy", "def f():\n    import random")),
    ("the kernels", Source("tidemill_kernels.kv_write", "from tidemill_scheduler.plan import StepPlan")),
    ("the kernels", Source("tidemill_kernels.kv_write", "import transformers")),
    ("the worker", Source("tidemill_worker.app", "def f():\n    __import__('tidemill_producer')")),
    ("the worker", Source("tidemill_worker.app", "f(importlib.import_module('tidemill_producer.cli'))")),
    ("the engine", Source("tidemill_worker.engine", "import torch")),
    ("the engine", Source("tidemill_worker.engine", "from tidemill_worker import service")),
    ("the engine", Source("tidemill_worker.engine", "from tidemill.queue import Queue")),
    ("the engine", Source("tidemill_worker.generation", "import torch")),
    ("the engine", Source("tidemill_worker.request", "from tidemill_worker import tokenizer")),
    ("the model sees", Source("tidemill_worker.model.runner", "from tidemill_worker.engine import Runner")),
    ("the model sees", Source("tidemill_worker.model.runner", "import tidemill_worker")),
    ("the model does", Source("tidemill_worker.model.runner", "from tidemill import client")),
    ("imports are", Source("tidemill_producer.cli", "from .splitting import split")),
    ("imports are", Source("tidemill_producer.cli", "from . import splitting")),
    ("the environment", Source("tidemill_worker.app", "import os\nHOME = os.environ['HOME']")),
    ("the environment", Source("tidemill_worker.app", "import os as o\ndef f():\n    return o.getenv('A')")),
    ("the environment", Source("tidemill.client", "from os import environ")),
    ("nothing is read", Source("tidemill.queue", "import pickle")),
    ("nothing is read", Source("tidemill_worker.model.loader", "def f():\n    from dill import loads")),
    ("templates are", Source("tidemill_worker.tokenizer", "from jinja2 import Template")),
)  # fmt: skip

INNOCENTS = (
    Source("tidemill.queue", "import json\nfrom redis.asyncio import Redis\nfrom tidemill import keys"),
    Source("tidemill.__main__", "def f():\n    import typer\n    from tidemill_worker.cli import app"),
    Source("tidemill_producer.cli", "import typer\nfrom tidemill import client\nfrom tokenizers import T"),
    Source("tidemill_scheduler.policy", "import heapq\nfrom tidemill_scheduler import plan"),
    Source("tidemill_kernels.kv_write", "import torch\ndef f():\n    import triton.language as tl"),
    Source("tidemill_worker.engine", "from tidemill.jobs import Job\nfrom tidemill_scheduler import plan"),
    Source("tidemill_worker.model.runner", "import torch\nfrom tidemill_worker.model import kv_cache"),
    Source("tidemill_worker.settings", "import os\nHOME = os.environ['HOME']"),
    Source("tidemill_worker.app", "import os\nfrom tidemill_worker import engine\nX = os.path.sep"),
)  # fmt: skip


def uses(source: Source) -> Iterator[Use]:
    """Every import of a module, wherever it stands, and every attribute read off an imported module."""
    names: dict[str, str] = {}
    for node, in_function in walk(ast.parse(source.text), in_function=False):
        if not isinstance(node, ast.stmt | ast.expr):
            continue
        for target, bound in imported(node):
            names.update(bound)
            yield Use(source.module, target, node.lineno, in_function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            target = f"{names[node.value.id]}.{node.attr}"
            yield Use(source.module, target, node.lineno, in_function, is_import=False)


def walk(node: ast.AST, *, in_function: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Like `ast.walk` in the order of the text, saying which nodes run only when a function is called."""
    yield node, in_function
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from walk(child, in_function=inside)


def imported(node: ast.AST) -> Iterator[tuple[str, dict[str, str]]]:
    """What a node imports, as dotted names, each with the local names it binds to modules."""
    match node:
        case ast.Import(names=names):
            for alias in names:
                root = alias.name.partition(".")[0]
                yield alias.name, {alias.asname: alias.name} if alias.asname else {root: root}
        case ast.ImportFrom(module=module, names=names, level=level):
            base = "." * level + (module or "")
            for alias in names:
                target = f"{base}.{alias.name}"
                yield target, {alias.asname or alias.name: target}
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name, {}


def violations(rule: Rule, source: Source) -> list[str]:
    if not within(source.module, *rule.modules):
        return []
    return [f"{use.module}:{use.line}: {use.target}" for use in uses(source) if rule.breaks(use)]


def module_name(component: str, path: Path) -> str:
    parts = path.relative_to(COMPONENTS[component]).with_suffix("").parts
    return ".".join((component, *(part for part in parts if part != "__init__")))


def python_files() -> list[Path]:
    return [path for folder in COMPONENTS.values() for path in sorted(folder.rglob("*.py"))]


def tree() -> list[Source]:
    return [
        Source(module_name(component, path), path.read_text(encoding="utf-8"))
        for component, folder in COMPONENTS.items()
        for path in sorted(folder.rglob("*.py"))
    ]


def vague(path: Path) -> bool:
    return path.stem.strip("_") in VAGUE_NAMES


def names_redis_keys(source: Source) -> bool:
    """Whether a string begins like a Redis key of ours; those are written in `tidemill.keys` only."""
    strings = (node for node in ast.walk(ast.parse(source.text)) if isinstance(node, ast.Constant))
    return source.module != "tidemill.keys" and any(
        isinstance(node.value, str) and node.value.startswith("tidemill:{") for node in strings
    )


def foreign_code(source: Source) -> list[int]:
    """Lines that would run code which is not the product's: a string's, or a model repository's.

    A model's template is text that transformers evaluates in a sandbox; it comes from the model's folder,
    through one module, and from no job.
    """
    calls = [node for node in ast.walk(ast.parse(source.text)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if runs_a_string(call) or trusts_a_repository(call)] + [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "apply_chat_template"
        and source.module != "tidemill_worker.chat_template"
    ]


def runs_a_string(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in {"eval", "exec", "compile"}


def trusts_a_repository(call: ast.Call) -> bool:
    """By saying so, or by leaving open whether; `weights_only=False` unpickles."""
    refused = {"trust_remote_code": False, "weights_only": True}
    return any(
        keyword.arg in refused
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is refused[keyword.arg])
        for keyword in call.keywords
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_tree_follows_the_import_table(rule: Rule) -> None:
    broken = [line for source in tree() for line in violations(rule, source)]
    assert not broken, f"{rule.name}, but:\n" + "\n".join(broken)


@pytest.mark.parametrize(("prefix", "source"), OFFENDERS)
def test_a_module_that_breaks_a_rule_is_seen(prefix: str, source: Source) -> None:
    (rule,) = (rule for rule in RULES if rule.name.startswith(prefix))
    assert violations(rule, source)


def test_every_rule_has_a_module_that_breaks_it() -> None:
    assert all(any(rule.name.startswith(prefix) for prefix, _ in OFFENDERS) for rule in RULES)


@pytest.mark.parametrize("source", INNOCENTS, ids=lambda source: source.module)
def test_what_the_table_allows_is_let_through(source: Source) -> None:
    assert [line for rule in RULES for line in violations(rule, source)] == []


@pytest.mark.parametrize("component", ["tidemill", "tidemill_producer"])
def test_submitting_jobs_loads_no_model_library(component: str) -> None:
    """What the import table says of each module also holds for all that they import in turn."""
    script = (
        f"import sys, pkgutil, importlib, {component} as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    module.name.endswith('__main__') or importlib.import_module(module.name)\n"
        "loaded = {'torch', 'transformers', 'numba', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_is_where_the_tree_says(component: str) -> None:
    assert (COMPONENTS[component] / "__init__.py").is_file()


@pytest.mark.parametrize("folder", READMES)
def test_every_component_has_a_readme_of_one_screen(folder: str) -> None:
    readme = ROOT / folder / "README.md"
    assert readme.is_file(), f"{folder}/README.md is missing"
    lines = len(readme.read_text(encoding="utf-8").splitlines())
    assert 0 < lines <= SCREEN, f"{folder}/README.md has {lines} lines, not 1 to {SCREEN}"


def test_files_stay_under_four_hundred_lines() -> None:
    folders = (*COMPONENTS.values(), ROOT / "tests", ROOT / "benchmarks")
    files = [path for folder in folders for pattern in ("*.py", "*.lua") for path in folder.rglob(pattern)]
    sizes = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {str(path): size for path, size in sizes.items() if size >= MAX_LINES} == {}


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [str(path.relative_to(ROOT)) for path in python_files() if vague(path)] == []
    assert vague(Path("tidemill/utils.py"))
    assert vague(Path("tidemill/_helpers.py"))
    assert not vague(Path("tidemill/utilisation.py"))


def test_redis_keys_are_written_in_one_module() -> None:
    assert [source.module for source in tree() if names_redis_keys(source)] == []
    assert names_redis_keys(Source("tidemill.queue", "KEY = f'tidemill:{{{queue}}}:jobs'"))
    assert not names_redis_keys(Source("tidemill.keys", "KEY = 'tidemill:{queue}:jobs'"))


def test_no_code_is_run_that_came_as_data() -> None:
    assert [(source.module, foreign_code(source)) for source in tree() if foreign_code(source)] == []


@pytest.mark.parametrize(
    "text",
    [
        "eval(job.prompt)",
        "def f():\n    exec(text)",
        "load(place, trust_remote_code=True)",
        "load(place, trust_remote_code=settings.trust)",
        "torch.load(path, weights_only=False)",
        "tokenizer.apply_chat_template(turns, chat_template=job.template)",
    ],
)
def test_code_that_came_as_data_is_seen(text: str) -> None:
    assert foreign_code(Source("tidemill_worker.tokenizer", text))


def test_no_job_brings_a_template() -> None:
    """Nor anything else that is evaluated: it is text, numbers, and schemas that are compiled to grammars."""
    from tidemill.jobs import Job, Message
    from tidemill.params import SamplingParams

    names = {name for model in (Job, Message, SamplingParams) for name in model.model_fields}
    assert not {name for name in names if "template" in name or "code" in name}
