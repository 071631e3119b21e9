"""``--set key.sub=value``."""

from __future__ import annotations

from typing import Any

from partool.diagnostics.record import Diagnostic, Span
from partool.spec._fields import SHORTHAND, sections, suggestion
from partool.spec._source import OVERRIDES, Source
from partool.spec._tree import read_tree

_FREE = {("launch", "env")}
"""Sections with keys of the user's own."""


def apply_overrides(data: dict[str, Any], source: Source) -> list[Diagnostic]:
    """Change ``data`` and the source's positions by its overrides; returns what is wrong with them."""
    found: list[Diagnostic] = []
    for number, text in enumerate(source.overrides, start=1):
        found += _apply(data, source, text, number)
    return found


def _apply(data: dict[str, Any], source: Source, text: str, line: int) -> list[Diagnostic]:
    key, equals, value_text = text.partition("=")
    whole = Span(OVERRIDES, line, 1, line, len(key) + 1)
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        help = "write it as key=value, such as training.steps=100"
        return [Diagnostic("PT012", f"--set {text!r:.60} is not of the form key=value", span=whole, help=help)]
    problem = _unknown(path)
    if problem is not None:
        return [Diagnostic("PT012", f"--set: there is no key {key.strip()!r}", span=whole, help=problem)]
    tree = read_tree(value_text.strip() or "null", OVERRIDES)
    if tree.diagnostics:
        span = Span(OVERRIDES, line, len(key) + 2, line, len(text) + 1)
        first = tree.diagnostics[0]
        return [Diagnostic("PT012", f"--set {key}: {first.message}", span=span, help=first.help)]
    inner = _section(data, path)
    if inner is None:
        message = f"--set {key}: a part of this path has a value that is no section"
        return [Diagnostic("PT012", message, span=whole, help="set the section's first key instead")]
    inner[path[-1]] = tree.data
    _forget(source, path)
    source.keys[path] = whole
    for part in tree.values:
        source.values[path + part] = Span(OVERRIDES, line, len(key) + 2, line, max(len(text), len(key) + 2) + 1)
    return []


def _unknown(path: tuple[str, ...]) -> str | None:
    """Return what may have been meant where the path names no key of the format; None if it names one."""
    for depth, key in enumerate(path):
        section = path[:depth]
        if section in _FREE:
            return None
        if section not in sections() or key not in sections()[section]:
            return suggestion(key, section) or "partool schema lists every key"
    return None


def _section(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the mapping that holds the last key, made where it is missing and expanded where it is one word."""
    inner = data
    for depth, key in enumerate(path[:-1]):
        value = inner.get(key)
        if value is None:
            value = {}
        elif isinstance(value, str) and depth == 0 and key in SHORTHAND:
            value = {SHORTHAND[key]: value}
        if not isinstance(value, dict):
            return None
        inner[key] = value
        inner = value
    return inner


def _forget(source: Source, path: tuple[str, ...]) -> None:
    for positions in (source.keys, source.values):
        for known in [known for known in positions if known[: len(path)] == path]:
            del positions[known]
