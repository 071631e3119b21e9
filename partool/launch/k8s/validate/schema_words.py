"""Turns errors of JSON Schema into messages about a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from partool.launch.k8s.validate.findings import FieldFault
from partool.launch.k8s.validate.manifest import Path

_LONGEST = 160


def in_words(errors: Iterable[Any], owner: str, path: Path) -> Iterator[FieldFault]:
    """Yield one finding for each error of ``jsonschema``; ``path`` is the checked value's path in the document."""
    for error in errors:
        yield from _one(error, owner, path + tuple(error.absolute_path))


def _one(error: Any, owner: str, path: Path) -> Iterator[FieldFault]:
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        properties = error.schema.get("properties", {})
        for key in error.instance.keys() - properties.keys():
            yield FieldFault(owner, (*path, key), "there is no such field", _nearest(str(key), properties))
    elif error.validator == "required":
        missing = [key for key in error.validator_value if key not in error.instance]
        yield from (FieldFault(owner, (*path, key), "is missing") for key in missing)
    elif error.validator == "type":
        wanted = error.validator_value
        kinds = [wanted] if isinstance(wanted, str) else [kind for kind in wanted if kind != "null"]
        yield FieldFault(owner, path, f"must be of type {' or '.join(kinds)}, not {_type(error.instance)}")
    elif error.validator in ("anyOf", "oneOf") and error.context:
        inner = [each for each in error.context if each.validator != "type"]
        if len(inner) == 1:
            yield from _one(inner[0], owner, path + tuple(inner[0].relative_path))
        else:
            kinds = sorted({str(kind) for each in error.context for kind in _kinds(each)} - {"null"})
            yield FieldFault(owner, path, f"must be of type {' or '.join(kinds)}" if kinds else _short(error.message))
    else:
        yield FieldFault(owner, path, _short(error.message))


def _kinds(error: Any) -> list[str]:
    value = error.validator_value if error.validator == "type" else []
    return [value] if isinstance(value, str) else list(value)


def _nearest(key: str, names: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(key, list(names), n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else ""


def _type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
