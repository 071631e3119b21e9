"""Writes the Markdown reference of specs from the sections' types, docstrings and the strategies' records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from partool.spec.schema import json_schema
from partool.strategies.kernel_parts import PARTS
from partool.strategies.optimizers import OPTIMIZERS
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS
from partool.strategies.targets import TARGETS

_HEAD = """\
# Reference of specs

<!-- Written by `make schema` from the models of `partool.spec` and the records of `partool.strategies`. -->

A spec is YAML. Only `model` and `data` are required. `auto` leaves a choice to the planner, which never overrides a
value that is given. Every field can also be given on the command line: `--set parallel.data.zero=3`. Where a field
takes *a section* or something else, a bare value is short for one key: `model: llama3-8b` means
`model: {preset: llama3-8b}`. `[]` after a name stands for an item of a list, `NAME` for a key of your own.
"""
_SANE = 100_000
"""Limits of numbers above this value are left out of the page, as no real setting comes near such limits."""
_WORDS = {"string": "text", "boolean": "true, false", "null": "null"}
_Section = dict[str, Any]


def reference() -> str:
    """Return the page as Markdown: a table per section, then a table per set of strategies."""
    schema = json_schema()
    parts = [_HEAD, *_section("", schema, schema["definitions"]), *_strategies()]
    return "\n".join(parts).rstrip() + "\n"


def _section(path: str, section: _Section, definitions: dict[str, _Section]) -> Iterator[str]:
    """Yield the table of a section and the tables of the sections in it."""
    yield f"## `{path}`\n" if path else "## Top level\n"
    if path:
        yield _line(section.get("description", "")) + "\n"
    yield "| field | values | default | meaning |\n|---|---|---|---|"
    inner: list[tuple[str, _Section]] = []
    for name, field in section["properties"].items():
        below = list(_sections_in(field, name, definitions))
        inner += below
        default = "required" if name in section.get("required", ()) else _default(field, bool(below))
        meaning = _line(field.get("description", "") or (below[0][1].get("description", "") if below else ""))
        yield f"| `{name}` | {_values(field, definitions)} | {default} | {meaning} |"
    yield ""
    for name, below_section in inner:
        yield from _section(f"{path}.{name}" if path else name, below_section, definitions)


def _sections_in(field: _Section, name: str, definitions: dict[str, _Section]) -> Iterator[tuple[str, _Section]]:
    """Yield (path, section) for each section that a field, or an item of its list or mapping, can hold."""
    for form in _forms(field):
        if "$ref" in form:
            yield name, definitions[form["$ref"].rpartition("/")[2]]
        elif form.get("type") == "array" and isinstance(form.get("items"), dict):
            yield from _sections_in(form["items"], f"{name}[]", definitions)
        elif form.get("type") == "object" and (items := _items(form)):
            yield from _sections_in(items, f"{name}.NAME", definitions)


def _forms(field: _Section) -> list[_Section]:
    """Return the JSON Schemas of the types that a field may have; nested unions are flattened."""
    inner = field.get("anyOf") or field.get("allOf") or field.get("oneOf")
    return [form for each in inner for form in _forms(each)] if inner else [field]


def _values(field: _Section, definitions: dict[str, _Section]) -> str:
    types = (_type(form, definitions) for form in _forms(field))
    return " or ".join(dict.fromkeys(text for text in types if text))


def _type(form: _Section, definitions: dict[str, _Section]) -> str:
    """Return text that describes the type in a JSON Schema; empty if there is nothing to say."""
    if "$ref" in form:
        return "a section"
    if "enum" in form or "const" in form:
        return ", ".join(f"`{_plain(value)}`" for value in form.get("enum", [form.get("const")]))
    if form.get("title") == "run":
        return "a run (`VALUE × NUMBER`)"
    kind = form.get("type", "anything")
    if kind == "array":
        return f"list of {_values(form['items'], definitions) if form.get('items') else 'anything'}"
    if kind == "object":
        items = _items(form)
        return f"mapping to {_values(items, definitions)}" if items else "mapping"
    if kind in ("integer", "number"):
        return _number("whole number" if kind == "integer" else "number", form)
    return str(_WORDS.get(kind, kind))


def _items(form: _Section) -> _Section:
    """Return the JSON Schema of a mapping's values; an empty dictionary means any type."""
    more = form.get("additionalProperties")
    by_key = [*form.get("patternProperties", {}).values(), *([more] if isinstance(more, dict) else [])]
    return by_key[0] if by_key else {}


def _number(word: str, form: _Section) -> str:
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {form[name]:g}" for name, sign in bounds.items() if name in form and form[name] < _SANE]
    return " ".join([word, ", ".join(limits)]).strip()


def _default(field: _Section, holds_sections: bool) -> str:
    value = field.get("default")
    if value is None or (holds_sections and isinstance(value, dict)):
        return ""
    return "empty" if value in ({}, []) else f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    """Return a value as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line(text: str) -> str:
    """Return a text on one line, escaped for a table cell."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def _strategies() -> Iterator[str]:
    """Yield a Markdown table for each set of strategies: schedules, sequence methods, optimizers and so on."""
    sets: tuple[tuple[str, str, dict[str, tuple[str, ...]]], ...] = (
        ("Schedules", "`parallel.pipeline.schedule`", {
            name: (one.words, f"stages per rank: {one.stages}", one.source) for name, one in SCHEDULES.items()
        }),
        ("Methods of sequence parallelism", "`parallel.sequence.method`", {
            name: (one.words, ", ".join(f"`{field}`" for field in one.fields), one.source)
            for name, one in METHODS.items()
        }),
        ("Optimizers", "`optimizer.name`", {
            name: (f"keeps {', '.join(f'`{moment}`' for moment in one.moments)}",
                   ", ".join(f"`{field}`" for field in one.reads), one.source)
            for name, one in OPTIMIZERS.items()
        }),
        ("Targets", "`launch.target`", {name: (one.words, "", "") for name, one in TARGETS.items()}),
        ("Parts that kernels compute", "`kernels.fused`", {name: (one.words, "", "") for name, one in PARTS.items()}),
    )  # fmt: skip
    for title, field, rows in sets:
        columns = [index for index in range(3) if any(row[index] for row in rows.values())]
        heads = [("what it is", "fields or sizes", "source")[index] for index in columns]
        yield f"## {title}\n"
        yield f"Names for {field}.\n"
        yield f"| name | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|"
        for name, row in rows.items():
            yield f"| `{name}` | {' | '.join(_line(row[index]) for index in columns)} |"
        yield ""
