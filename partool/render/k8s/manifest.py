"""Kubernetes objects, and their YAML, which readers of every YAML version parse to the same values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict

import yaml

from partool.render.shell import comment

_PLAIN = re.compile(r"-{0,2}[A-Za-z/][A-Za-z0-9_./@-]*(:[A-Za-z0-9_./@-]+)*")
_WORDS = {"y", "n", "yes", "no", "true", "false", "on", "off", "null"}
"""Words that YAML 1.1, which kubectl and the API server follow, does not read as text."""

Value: TypeAlias = "Mapping[str, Value] | Sequence[Value] | str | int | float | None"
"""Value of a field of an object."""
Fields: TypeAlias = dict[str, Value]
"""Fields of a part of an object, by name."""


class Metadata(TypedDict, total=False):
    """Names and labels of an object; ``namespace`` may be missing."""

    name: str
    namespace: str
    labels: dict[str, str]
    annotations: dict[str, str]


class Object(TypedDict):
    """An object of a cluster."""

    apiVersion: str
    kind: str
    metadata: Metadata
    spec: NotRequired[Fields]
    type: NotRequired[str]
    immutable: NotRequired[bool]
    data: NotRequired[dict[str, str]]
    stringData: NotRequired[dict[str, str]]


class _Dumper(yaml.SafeDumper):
    """Writes no anchors, and quotes strings: PyYAML does not quote 1e3, which Go's reader takes for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    # Single quotes are used if they save backslashes; the emitter switches to double quotes where it must.
    style = None if plain else "'" if '"' in value and value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _string)


def text(objects: Iterable[Object], remarks: Sequence[str] = ()) -> str:
    """Return a YAML text: ``remarks`` as comments, then one document per object with the keys in the object's order."""
    head = "".join(f"# {comment(remark)}\n" for remark in remarks)
    return head + "---\n".join(_document(each) for each in objects)


def _document(item: Object) -> str:
    if item["kind"] != "ConfigMap":
        return _dump(item)
    rest = _dump({key: value for key, value in item.items() if key != "data"})
    return rest + "data:\n" + "".join(_block(name, value) for name, value in item["data"].items())


def _dump(item: Mapping[str, object]) -> str:
    return yaml.dump(item, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 30)


def _block(name: str, value: str) -> str:
    """Return lines of printable ASCII as a literal block, as PyYAML takes a second for a plan of 900 kB.

    PyYAML writes any other text.
    """
    lines = value.split("\n")[:-1]
    plain = value.isascii() and value.endswith("\n") and all(line.isprintable() for line in lines)
    if not plain or not lines[0] or lines[0][0] == " " or not lines[-1]:
        return "".join(f"  {line}\n" for line in _dump({name: value}).splitlines())
    return f"  {name}: |\n" + "".join(f"    {line}\n" if line else "\n" for line in lines)
