"""Objects against a structural schema of Kubernetes, as `kubectl --validate=strict` holds them.

Such a schema uses a small part of JSON Schema, all of which is here but for defaults and the rules
in CEL; a field that it does not name is a problem, where the server would drop it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
KNOWN = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "pattern"),
    *("minimum", "minLength", "maxLength", "maxItems", "anyOf", "format", "default"),
    *("x-kubernetes-int-or-string", "x-kubernetes-validations"),
}


def problems(value: Any, schema: dict[str, Any], at: str = "") -> Iterator[str]:
    """What of `value` the schema does not allow; nothing if all of it is."""
    assert set(schema) <= KNOWN, f"{at}: the schema says {set(schema) - KNOWN}"
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{at}: {value!r} is neither a number nor text"
            return
    elif not isinstance(value, TYPES[schema["type"]]) or (
        isinstance(value, bool) and schema["type"] == "integer"
    ):
        yield f"{at}: {value!r} is no {schema['type']}"
        return
    yield from _of_scalar(value, schema, at)
    if isinstance(value, dict):
        yield from _of_object(value, schema, at)
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            yield f"{at}: more than {schema['maxItems']}"
        for i, item in enumerate(value):
            yield from problems(item, schema["items"], f"{at}[{i}]")


def _of_scalar(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    if value not in schema.get("enum", [value]):
        yield f"{at}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{at}: {value!r} does not match {schema['pattern']}"
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            yield f"{at}: {value!r} is too short or too long"
    if isinstance(value, int) and value < schema.get("minimum", value):
        yield f"{at}: {value} is less than {schema['minimum']}"


def _of_object(value: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    fields = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in value:
            yield f"{at}: no {name}"
    for name, item in value.items():
        below = fields.get(name, schema.get("additionalProperties"))
        if below is not None:
            yield from problems(item, below, f"{at}.{name}")
        elif fields:  # without any field and any rule it takes all: metadata
            yield f"{at}: unknown field {name}"
