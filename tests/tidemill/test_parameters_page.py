"""docs/parameters.md says of every field what the model says, and names tests that exist."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.jobs import FinishReason, Job, Status
from tidemill.params import SamplingParams, StructuredOutputs
from tidemill.schema import Wire

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
MODELS: dict[str, type[Wire]] = {
    "Job": Job,
    "Params": SamplingParams,
    "Structured outputs": StructuredOutputs,
}
Row = dict[str, str]


def tables(section: str) -> dict[str, Row]:
    """The rows of a section's tables by what their first column says, without its backticks."""
    rows: dict[str, Row] = {}
    heading: list[str] = []
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (body,) = (part for part in parts if part.startswith(f"{section}\n"))
    for line in body.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heading = []
        elif not heading:
            heading = cells
        elif not set(line) <= set("| -"):
            rows[cells[0].strip("`")] = dict(zip(heading, cells, strict=True))
    return rows


def schema_of(model: type[Wire]) -> dict[str, Any]:
    return model.model_json_schema()


def range_of(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """What a JSON schema allows, in the words of the page."""
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind != {"type": "null"}]
        return " or ".join(range_of(kind, definitions) for kind in kinds)
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        values = definitions[name].get("enum")
        return ", ".join(f"`{value}`" for value in values) if values else f"`{name}`"
    inner = schema.get("items", schema.get("additionalProperties"))
    parts = f": {range_of(inner, definitions)}" if isinstance(inner, dict) else ""
    return KINDS[schema["type"]](schema) + parts


def truth(schema: dict[str, Any]) -> str:
    return "`true`" if schema.get("const") else "`true`, `false`"


def number(schema: dict[str, Any]) -> str:
    lowest, highest = schema.get("minimum"), schema.get("maximum")
    if lowest is not None and highest is not None:
        return f"{schema['type']}, {lowest:g} to {highest:g}"
    words = {"exclusiveMinimum": "above", "minimum": "at least", "maximum": "at most"}
    said = [f"{word} {schema[bound]:g}" for bound, word in words.items() if bound in schema]
    if "exclusiveMaximum" in schema:
        said.append(f"below 2^{math.log2(schema['exclusiveMaximum']):g}")
    return ", ".join([schema["type"], *said])


def text(schema: dict[str, Any]) -> str:
    if "pattern" in schema:
        return f"text that matches `{schema['pattern']}`"
    size = size_of(schema, "Length")
    return f"text{size} characters" if size else "text"


def collection(schema: dict[str, Any]) -> str:
    if schema["type"] == "array":
        return "list" + size_of(schema, "Items")
    return "object" + size_of(schema, "Properties")


def size_of(schema: dict[str, Any], kind: str) -> str:
    least, most = schema.get(f"min{kind}"), schema.get(f"max{kind}")
    if least is None:
        return "" if most is None else f" of at most {most}"
    return f" of at least {least}" if most is None else f" of {least} to {most}"


KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "boolean": truth,
    "integer": number,
    "number": number,
    "string": text,
    "array": collection,
    "object": collection,
}


def default_of(model: type[Wire], name: str) -> str:
    (field,) = (field for key, field in model.model_fields.items() if name in (key, field.alias))
    if name == "id":
        return "drawn"
    value = field.get_default(call_default_factory=True)
    return f"`{json.dumps(value.model_dump(exclude_defaults=True) if isinstance(value, Wire) else value)}`"


FIELDS = [(section, name) for section, model in MODELS.items() for name in schema_of(model)["properties"]]


@pytest.mark.parametrize("section", MODELS)
def test_the_page_has_the_fields_there_are(section: str) -> None:
    assert set(tables(section)) == set(schema_of(MODELS[section])["properties"])


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_a_field_has_the_default_and_the_range_that_the_page_says(section: str, name: str) -> None:
    schema = schema_of(MODELS[section])
    row = tables(section)[name]
    assert row["meaning"]
    assert row["default"] == default_of(MODELS[section], name)
    assert row["range"] == range_of(schema["properties"][name], schema.get("$defs", {}))


def test_the_page_has_the_finish_reasons_there_are() -> None:
    rows = tables("Results")
    assert list(rows) == list(FinishReason)
    statuses = {row["status of the job"].strip("`") for row in rows.values()}
    assert statuses == {"any", *Status} - {Status.SUCCEEDED}


def named_tests() -> list[tuple[str, str]]:
    sections = (*MODELS, "Together", "Results")
    return [
        (row, test)
        for section in sections
        for row, cells in tables(section).items()
        for test in cells["tests"].split()
    ]


def existing_tests() -> set[str]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("test_*.py"))
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_row_names_tests_and_all_of_them_exist() -> None:
    named = named_tests()
    rows = {row for section in (*MODELS, "Together", "Results") for row in tables(section)}
    assert rows == {row for row, _ in named}
    assert all(re.fullmatch(r"`test_\w+`", test) for _, test in named)
    assert {test.strip("`") for _, test in named} - existing_tests() == set()


def test_the_checks_see_what_is_wrong() -> None:
    """The page is read by patterns; one that matched nothing would agree with everything."""
    assert len(FIELDS) > 35
    assert len(named_tests()) > 60
    assert range_of({"type": "integer", "minimum": 1}, {}) != range_of({"type": "integer", "minimum": 2}, {})
    assert "test_the_checks_see_what_is_wrong" in existing_tests()
