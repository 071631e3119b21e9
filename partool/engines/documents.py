"""Composes YAML and JSON of other systems; whatever could grow without end, or hide a value, is refused."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from partool.diagnostics.record import Diagnostic, Span

MAX_DEPTH = 32
_SECTION_DEPTH = 6
"""Sections within sections that are read one by one."""
MAX_VALUES = 5_000
"""Keys and values of one file; the longest of the 35 files of ``tests/data/corpus`` has 129."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class DocumentOutline:
    """What a text is before its values are built."""

    keys: tuple[str, ...]
    """Names at the top of a mapping, as far as the text could be read."""
    problem: str = ""
    line: int = 1
    help: str = ""
    broken: bool = False
    """Whether the text is neither YAML nor JSON, rather than one that is refused."""


@lru_cache(16)
def outline(text: str) -> DocumentOutline:
    """Return the names at the top of a text, and what is wrong with it; nothing of it is built."""
    keys = list[str]()
    try:
        problem, line, help = _scan(_plain(text), keys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        return DocumentOutline(
            (), str(getattr(error, "problem", None) or error), mark.line + 1 if mark else 1, broken=True
        )
    return DocumentOutline(tuple(keys), problem, line, help)


def _plain(text: str) -> str:
    return text.replace("\t", " ")  # JSON may be indented with tabs


def _scan(text: str, keys: list[str]) -> tuple[str, int, str]:
    """Return what is refused, its line and help; ``keys`` gets the names at the top."""
    depth, values, documents, is_key = 0, 0, 0, False
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                return "the file holds several documents", line, "give one of them"
        if isinstance(event, yaml.AliasEvent):
            return f"*{event.anchor:.40} repeats other values by an alias", line, "write the values out"
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            values += 1
            if values > MAX_VALUES:
                return f"the file has more than {MAX_VALUES:,} keys and values", line, "remove what is not of the run"
            if event.tag not in (None, "!"):
                return f"the tag {event.tag:.40} asks for another kind of value", line, "write the plain value"
            if depth == 1 and is_key and isinstance(event, yaml.ScalarEvent):
                keys.append(event.value)
            # At the top of a mapping, every second value is a key.
            is_key = isinstance(event, yaml.MappingStartEvent) if depth == 0 else is_key != (depth == 1)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                return f"values are nested more than {MAX_DEPTH} deep", line, "remove what is not of the run"
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return "", 1, ""


def document(path: Path, text: str, what: str) -> tuple[yaml.MappingNode | None, list[Diagnostic]]:
    """Return the root of a file, or findings: it is not ``what``, or it holds what is refused."""
    structure = outline(text)
    span = Span(str(path), structure.line, 1, structure.line, 1)
    if structure.broken:
        return None, [Diagnostic("PT820", f"{path} is no {what}: {structure.problem}", help="mend the file", span=span)]
    if structure.problem:
        return None, [Diagnostic("PT829", f"{path}: {structure.problem}", help=structure.help, span=span)]
    root = yaml.compose(_plain(text), Loader=_LOADER)
    if not isinstance(root, yaml.MappingNode):
        return None, [Diagnostic("PT820", f"{path} is no {what}: it has no names at its top", help="name another file")]
    return root, list(_odd_keys(path, root))


def _odd_keys(path: Path, node: yaml.Node) -> Iterator[Diagnostic]:
    """Yield findings about keys that are given twice, that merge other values, or that are no names."""
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _odd_keys(path, each)
    if not isinstance(node, yaml.MappingNode):
        return
    lines = dict[str, int]()
    for key, value in node.value:
        line = key.start_mark.line + 1
        span = Span(str(path), line, 1, line, 1)
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            yield Diagnostic("PT820", f"{path} has a key that is no name", help="write the values out", span=span)
        elif key.value in lines:
            message = f"{key.value:.60} is given twice, first in line {lines[key.value]}"
            yield Diagnostic("PT821", message, help="keep one of the two", span=span)
        else:
            lines[key.value] = line
        yield from _odd_keys(path, value)


_DOTTED = re.compile(r"(?<![\w\"'.-])(?:[\w\"'-]++\s*+\.\s*+){33}")
"""A key of more than 32 tables: what is kept of each grows with the square of their number."""


@lru_cache(4)
def toml(text: str) -> tuple[dict[str, Any], str]:
    """Return the tables of TOML, and why there are none."""
    if _DOTTED.search(text):
        return {}, f"tables are nested more than {MAX_DEPTH} deep"
    try:
        return tomllib.loads(text), ""
    except RecursionError:
        return {}, "values are nested too deep"
    except ValueError as error:  # of TOML, or a number of thousands of digits
        return {}, str(error)


def names(text: str) -> frozenset[str]:
    """Return the names at the top of a mapping of YAML or JSON; none if the text is something else."""
    keys = outline(text).keys
    return frozenset(keys) if all(re.fullmatch(r"[\w.-]+", key) for key in keys) else frozenset()


def leaves(
    node: Any, before: str = "", depth: int = 0, *, opaque: Collection[str] = ()
) -> Iterator[tuple[str, Any, int]]:
    """Yield name, value and line of each value of a mapping; sections that are empty or in ``opaque`` are values.

    A value that cannot be built, as a date in a thirteenth month, is its text or its kind.
    """
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{before}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value and name not in opaque and depth < _SECTION_DEPTH:
            yield from leaves(value, f"{name}.", depth + 1, opaque=opaque)
            continue
        try:
            plain = SafeConstructor().construct_object(value, deep=True)
        except (yaml.YAMLError, ValueError, RecursionError):
            plain = value.value if isinstance(value, yaml.ScalarNode) else f"a {value.id}"
        yield name, plain, key.start_mark.line + 1
