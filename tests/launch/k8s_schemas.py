"""Schemas that the tests' API server checks objects against: strict ones of core kinds and of installed types."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import yaml

CRDS = Path(os.environ.get("PARTOOL_TEST_CRDS") or Path(__file__).parents[3] / "shared" / "crds")
"""Folder with definitions of installed types beside the checkout; third-party data, so it may be absent."""
_DROPPED = {"description", "default", "nullable", "format", "example", "externalDocs"}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Fault(NamedTuple):
    """An invalid field."""

    field: str
    message: str
    unknown: bool
    """Whether the schema has no such field."""


class CustomType(NamedTuple):
    """An installed type in one version."""

    group: str
    version: str
    plural: str
    kind: str
    schema: dict[str, Any]


@functools.cache
def definitions(folder: Path = CRDS) -> tuple[dict[str, Any], ...]:
    """Return the definitions (CRDs) in a folder; they are shared, and must not be changed."""
    files = sorted(folder.rglob("*.yaml"))
    found = [each for file in files for each in yaml.load_all(file.read_text(encoding="utf-8"), _LOADER)]
    return tuple(each for each in found if (each or {}).get("kind") == "CustomResourceDefinition")


@functools.cache
def custom_types(folder: Path = CRDS) -> tuple[CustomType, ...]:
    """Return the types that the definitions in a folder install."""
    found = []
    for document in definitions(folder):
        spec = document["spec"]
        names, group = spec["names"], spec["group"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            found.append(CustomType(group, version["name"], names["plural"], names["kind"], schema))
    return tuple(found)


def faults(document: dict[str, Any], schema: dict[str, Any] | None) -> list[Fault]:
    """Return the faults of an object of a core kind, or of an object with an installed type's schema."""
    judge = _core(document["apiVersion"], document["kind"]) if schema is None else _custom(_Held(schema))
    return [] if judge is None else [fault for error in judge.iter_errors(document) for fault in _faults(error)]


def _faults(error: jsonschema.ValidationError) -> Iterator[Fault]:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        for name in error.instance:
            if name not in error.schema.get("properties", {}):
                yield Fault(f"{place}.{name}".lstrip("."), "unknown field", True)
    elif error.validator == "required":
        yield Fault(f"{place}.{error.message.split(chr(39))[1]}".lstrip("."), "Required value", False)
    else:
        yield Fault(place, f"Invalid value: {error.message[:120]}", False)


@functools.cache
def _core(api_version: str, kind: str) -> jsonschema.Draft202012Validator | None:
    import kubernetes_validate
    from referencing import Registry, Resource

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.36.0-local-strict"
    group, _, version = api_version.rpartition("/")
    file = folder / f"{kind.lower()}-{group.split('.')[0]}{'-' if group else ''}{version}.json"
    if not file.exists():
        return None
    schema = json.loads(file.read_text(encoding="utf-8"))
    definitions = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))
    registry = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


class _Held:
    """A hashable schema, compared by identity."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.schema is self.schema


@functools.cache
def _custom(held: _Held) -> jsonschema.Draft202012Validator:
    closed = _closed(held.schema)
    closed["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    closed["properties"]["metadata"] = {"type": "object"}
    closed.pop("additionalProperties", None)
    return jsonschema.Draft202012Validator(closed | {"additionalProperties": False})


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a structural schema as JSON Schema that allows no unnamed fields."""
    strict = {key: value for key, value in schema.items() if key not in _DROPPED and not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
        strict["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            strict[key] = _closed(schema[key])
    if "properties" in schema:
        strict["properties"] = {name: _closed(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict.setdefault("additionalProperties", False)
    # an empty value of a field with a default becomes the default
    return {"anyOf": [strict, {"type": "null"}]} if schema.get("nullable") or "default" in schema else strict
