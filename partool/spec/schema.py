"""The format of specs as a JSON Schema of draft 7, which every editor supports."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from partool.spec._base import ONE_KEY, Section
from partool.spec.spec import Spec

SCHEMA_ID = "urn:partool:spec:1"
"""Name of the schema, by which tools recognise it whatever file holds it; the number is that of the format (``spec``).
It is a URN, because nobody has to fetch the schema: ``partool schema`` prints it, and installations contain it."""
_WORD = {"type": "string"}
_TIER = {"enum": ["auto", "none", "cpu", "nvme"]}
_SHORTHAND: dict[str, tuple[tuple[str, str, dict[str, Any] | None], ...]] = {
    "Spec": (("model", "preset", _WORD), ("hardware", "accelerator", _WORD), ("data", "source", _WORD)),
    "ParallelSpec": (
        ("tensor", "degree", None),
        ("pipeline", "stages", None),
        ("sequence", "degree", None),
        ("offload", "optimizer", _TIER),
    ),
}
"""Outer section → (inner section that may be one bare value, key that this value sets, the value's type).

The type None means the type of the key."""


def json_schema() -> dict[str, Any]:
    """Return the schema of a spec."""
    raw = Spec.model_json_schema()
    for model in dict.fromkeys(_sections(Spec)):
        section = raw if model is Spec else raw["$defs"][model.__name__]
        for field, text in _descriptions(model).items():
            section["properties"][field]["description"] = text
    schema: dict[str, Any] = _draft7(raw)
    for owner, shorthands in _SHORTHAND.items():
        properties = (schema if owner == "Spec" else schema["definitions"][owner])["properties"]
        for section, key, kind in shorthands:
            value = {
                **(kind or _type_of(schema, properties[section], key)),
                "description": f"Short for {{{key}: ...}}.",
            }
            full = {name: properties[section][name] for name in ("$ref", "allOf") if name in properties[section]}
            rest = {name: item for name, item in properties[section].items() if name not in full}
            properties[section] = {"anyOf": [value, full], **rest}
    properties = schema["definitions"]["ParallelSpec"]["properties"]
    for (_, name), key in ONE_KEY.items():
        values = properties[name]["anyOf"]
        section = {"type": "object", "properties": {key: {"anyOf": values}}}
        properties[name]["anyOf"] = [*values, {**section, "required": [key], "additionalProperties": False}]
    return {"$schema": "http://json-schema.org/draft-07/schema#", "$id": SCHEMA_ID, **schema, "title": "partool spec"}


def _type_of(schema: dict[str, Any], section: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the JSON Schema of the types that a section's key may have."""
    name = section["allOf"][0]["$ref"] if "allOf" in section else section["$ref"]
    return {"anyOf": schema["definitions"][name.rpartition("/")[2]]["properties"][key]["anyOf"]}


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the section classes in a type, including the type itself and nested sections."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _sections(field.annotation)
    for argument in get_args(annotation):
        yield from _sections(argument)


def _descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return field name → docstring for a section, those of the sections that it extends included.

    pydantic can collect docstrings as it builds the models, but would then parse the source at every start of partool.
    """
    bases = [base for base in model.__bases__ if issubclass(base, Section) and base is not Section]
    docstrings = {name: text for base in bases for name, text in _descriptions(base).items()}
    tree = ast.parse(inspect.getsource(sys.modules[model.__module__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            docstrings[field.target.id] = inspect.cleandoc(str(ast.literal_eval(after.value)))
    return docstrings


def _draft7(value: Any, *, names: bool = False) -> Any:
    """Return a part of a schema with draft-7 keywords only; ``names`` is True if its keys are names, not keywords."""
    if isinstance(value, list):
        return [_draft7(item) for item in value]
    if isinstance(value, str):
        return value.replace("#/$defs/", "#/definitions/")
    if not isinstance(value, dict):
        return value
    renamed = {("definitions" if key == "$defs" and not names else key): inner for key, inner in value.items()}
    result = {
        key: _draft7(inner, names=not names and key in ("properties", "definitions")) for key, inner in renamed.items()
    }
    if not names and "$ref" in result and len(result) > 1:
        # Draft 7 ignores keywords next to a reference.
        result["allOf"] = [{"$ref": result.pop("$ref")}]
    return result
