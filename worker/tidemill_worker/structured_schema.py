"""Whether a JSON schema that refers to itself lets a text end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_LOOKS = 100_000
"""Parts of a schema looked at, counted each time; some tenths of a second."""


def can_end(schema: Mapping[str, Any] | bool) -> bool:
    """False if every text of `schema` would contain another text of it, and so on without end.

    Looks at references within the schema, at what an object requires and at what an array must
    hold. Contradictions between bounds are found when the schema is compiled. True if it cannot be
    told with a bounded number of looks.
    """
    return _Ending(schema).of(schema)


class _Ending:
    """The least fixed point over the schemas that are referred to: at first, none of them can end."""

    def __init__(self, root: Mapping[str, Any] | bool) -> None:
        self._root = root
        self._targets: dict[str, bool] = {}
        self._found: list[str] = []
        self._looks = 0

    def of(self, schema: object) -> bool:
        self._look(schema)
        for reference in self._found:  # grows meanwhile
            self._targets[reference] = self._look(self._resolve(reference))
        changed = True
        while changed:
            changed = False
            for reference in reversed(self._found):  # found last, referred to by the others
                if not self._targets[reference] and self._look(self._resolve(reference)):
                    self._targets[reference] = changed = True
        return self._look(schema)

    def _look(self, schema: object) -> bool:
        self._looks += 1
        if not isinstance(schema, Mapping) or self._looks > MAX_LOOKS:
            return schema is not False
        parts = [
            self._reference(schema),
            *(self._look(part) for part in _listed(schema, "allOf")),
            *(any(map(self._look, _listed(schema, key))) for key in ("anyOf", "oneOf") if key in schema),
        ]
        return all(parts) and self._must_hold(schema)

    def _reference(self, schema: Mapping[str, Any]) -> bool:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        if reference not in self._targets:
            self._targets[reference] = False
            self._found.append(reference)
        return self._targets[reference]

    def _must_hold(self, schema: Mapping[str, Any]) -> bool:
        """Whether what objects and arrays cannot do without can end; unless it may be something else."""
        kinds = schema.get("type")
        if kinds not in ("object", "array"):
            return True
        if kinds == "object":
            properties = schema.get("properties")
            required = [name for name in _listed(schema, "required") if isinstance(name, str)]
            known = properties if isinstance(properties, Mapping) else {}
            return all(self._look(known.get(name, True)) for name in required)
        return all(map(self._look, _first_items(schema)))

    def _resolve(self, reference: str) -> object:
        """What a JSON pointer names; where it names nothing, the compiler will say so."""
        place: object = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, Mapping) and key in place:
                place = place[key]
            elif isinstance(place, list) and key.isdecimal() and int(key) < len(place):
                place = place[int(key)]
            else:
                return True
        return place


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return list(value) if isinstance(value, list | tuple) else []


def _first_items(schema: Mapping[str, Any]) -> list[Any]:
    """Schemas of the items that the array must have, those of one schema once."""
    least = schema.get("minItems", 0)
    if not isinstance(least, int):
        return []
    prefix = _listed(schema, "prefixItems")
    rest = [schema["items"]] if least > len(prefix) and "items" in schema else []
    return [*prefix[: max(least, 0)], *rest]
