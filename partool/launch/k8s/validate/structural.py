"""Turns the schemas of CRDs into strict JSON Schemas, and makes the checks that JSON Schema cannot express.

Rules: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/ (structural
schemas, pruning, defaulting, nullable); types of lists: https://kubernetes.io/docs/reference/using-api/server-side-apply/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from partool.launch.k8s.validate.findings import FieldFault
from partool.launch.k8s.validate.manifest import Path

Schema = dict[str, Any]

_KEPT = (
    "type", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum", "multipleOf", "minItems", "maxItems",
    "uniqueItems", "minProperties", "maxProperties", "required", "allOf", "anyOf", "oneOf", "not",
)  # fmt: skip
_INTEGERS = {"int32": 2**31, "int64": 2**63}
_OPEN = "x-kubernetes-preserve-unknown-fields"
_METADATA: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "generateName": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        "finalizers": {"type": "array", "items": {"type": "string"}},
        "ownerReferences": {"type": "array", "items": {"type": "object"}},
    },
    "additionalProperties": False,
}
"""Metadata that a new object may set; the server fills in the rest."""


def strict(schema: Schema) -> Schema:
    """Return a JSON Schema of a whole object; the schema refuses unknown fields unless the definition allows them."""
    body = _strict(schema)
    properties = {**body.get("properties", {}), "metadata": _METADATA}
    properties["apiVersion"] = properties["kind"] = {"type": "string"}
    required = sorted({*body.get("required", ()), "apiVersion", "kind", "metadata"})
    return {**body, "type": "object", "properties": properties, "required": required}


def _strict(schema: Schema) -> Schema:
    strict_schema: Schema = {key: schema[key] for key in _KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        strict_schema.pop("type", None)
        strict_schema.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    if "properties" in schema:
        strict_schema["properties"] = {name: _strict(child) for name, child in schema["properties"].items()}
    if isinstance(schema.get("items"), dict):
        strict_schema["items"] = _strict(schema["items"])
    rest = schema.get("additionalProperties")
    if isinstance(rest, dict):
        strict_schema["additionalProperties"] = _strict(rest)
    elif schema.get("type") == "object" and rest is None and not schema.get(_OPEN):
        strict_schema["additionalProperties"] = False
    if schema.get("x-kubernetes-embedded-resource"):
        object_fields = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
        strict_schema["properties"] = {**object_fields, **strict_schema.get("properties", {})}
    if schema.get("format") in _INTEGERS:
        bound = _INTEGERS[schema["format"]]
        strict_schema["minimum"] = max(strict_schema.get("minimum", -bound), -bound)
        strict_schema["maximum"] = min(strict_schema.get("maximum", bound - 1), bound - 1)
    if schema.get("nullable") or "default" in schema:  # a null is dropped before a default is set
        return {"anyOf": [strict_schema, {"type": "null"}]}
    return strict_schema


def doubled(schema: Schema, value: Any, owner: str, path: Path = ()) -> Iterator[FieldFault]:
    """Find repeated items in lists that are sets or have keys (``x-kubernetes-list-type``)."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from doubled(child(schema, name), item, owner, (*path, name))
    elif isinstance(value, list):
        items = child(schema, 0)
        seen: list[Any] = []
        for index, item in enumerate(value):
            key = _key(schema, items, item)
            if key is not None and key in seen:
                yield FieldFault(owner, (*path, index), f"{_shown(key)} is already in the list")
            seen.append(key)
            yield from doubled(items, item, owner, (*path, index))


def _key(schema: Schema, items: Schema, item: Any) -> Any:
    """Return the part of a list's item that must be unique in the list; None if the item has no such part."""
    kind = schema.get("x-kubernetes-list-type")
    if kind == "set":
        return item
    if kind == "map" and isinstance(item, dict):
        names = schema.get("x-kubernetes-list-map-keys", ())
        return [item.get(name, child(items, name).get("default")) for name in names]
    return None


def _shown(key: Any) -> str:
    return " ".join(map(repr, key)) if isinstance(key, list) else repr(key)


def child(schema: Schema, key: str | int) -> Schema:
    """Return the schema of the list item or field ``key``; an empty schema if there is none."""
    if isinstance(key, int):
        sub = schema.get("items")
    else:
        sub = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
    return sub if isinstance(sub, dict) else {}


def with_defaults(schema: Schema, value: Any) -> Any:
    """Return a value with the defaults of its schema, which the server sets before it evaluates rules."""
    if isinstance(value, dict):
        fields = {
            name: item
            for name, item in value.items()
            if item is not None or child(schema, name).get("nullable") or "default" not in child(schema, name)
        }
        for name, sub in schema.get("properties", {}).items():
            if name not in fields and "default" in sub:
                fields[name] = sub["default"]
        return {name: with_defaults(child(schema, name), item) for name, item in fields.items()}
    if isinstance(value, list):
        return [with_defaults(child(schema, 0), item) for item in value]
    return value


def subschema(schema: Schema, pattern: str) -> Schema | None:
    """Return the schema at a place such as ``spec.tasks.*.name``; None if there is none."""
    for step in pattern.split("."):
        if step == "*":
            inner = schema.get("items", schema.get("additionalProperties"))
        else:
            inner = schema.get("properties", {}).get(step)
        if not isinstance(inner, dict):
            return None
        schema = inner
    return schema
