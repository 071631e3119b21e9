"""A spec's text, and the positions of its keys and values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from partool.diagnostics.record import Diagnostic, Span
from partool.diagnostics.secrets import MASK, is_harmless, is_secret_name, masked

SpecPath = tuple[str | int, ...]

_IGNORE = re.compile(r"#\s*partool:\s*ignore\[([A-Z0-9,\s]+)\]")
_ABOUT_KEYS = ("PT008", "PT101", "PT221", "PT222", "PT525")


_REFERENCES = (("file",), ("secret",), ("key",))
"""Paths of fields within an entry of ``launch.secrets``; their values refer to a secret but are not secret."""


def is_secret(path: SpecPath) -> bool:
    """Return True if the value at a path is a secret or refers to a secret."""
    return path[:2] == ("launch", "secrets") or any(isinstance(part, str) and is_secret_name(part) for part in path)


@dataclass(slots=True)
class Source:
    """The text of a spec, with the span of every key and value by path."""

    file: str
    text: str = ""
    keys: dict[SpecPath, Span] = field(default_factory=dict)
    values: dict[SpecPath, Span] = field(default_factory=dict)
    secrets: dict[str, list[Span]] = field(default_factory=dict)
    """Secret value → its spans in the text."""

    @property
    def lines(self) -> list[str]:
        """Return the lines of the text."""
        return self.text.split("\n")

    @property
    def texts(self) -> Mapping[str, list[str]]:
        """Return file name → lines with secrets hidden, for printing findings; empty if the file could not be read."""
        if not self.text:
            return {}
        lines = self.lines
        for span in (span for spans in self.secrets.values() for span in spans if span.file == self.file):
            lines[span.line - 1] = lines[span.line - 1][: span.column - 1] + MASK
            for number in range(span.line, min(span.end_line - (span.end_column <= 1), len(lines))):
                lines[number] = MASK
        return {self.file: lines}

    def note_secrets(self, value: Any, path: SpecPath = ()) -> None:
        """Collect the secrets of a document in ``self.secrets``, so that findings and excerpts can hide them."""
        if isinstance(value, dict):
            named = any(is_secret_name(name) for name in (value.get("name"), value.get("key")) if isinstance(name, str))
            for key, inner in value.items():
                if named and key == "value":
                    self._note(inner, (*path, key))
                else:
                    self.note_secrets(inner, (*path, key))
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                self.note_secrets(inner, (*path, index))
        elif is_secret(path) and not (path[:2] == ("launch", "secrets") and path[3:] in _REFERENCES):
            self._note(value, path)

    def _note(self, value: Any, path: SpecPath) -> None:
        if isinstance(value, str | int | float) and not isinstance(value, bool) and not is_harmless(str(value)):
            places = self.secrets.setdefault(str(value), [])
            places += [self.values[path]] if path in self.values else []

    def span(self, path: SpecPath, *, key: bool = False) -> Span:
        """Return the position of the value at a path, or of its key if ``key`` is True or the value has several lines.

        If the path is not in the file, return the position of the key of the nearest enclosing section.
        """
        if path in self.values:
            span = self.values[path]
            return self.keys.get(path, span) if key or span.line != span.end_line else span
        for length in range(len(path) - 1, 0, -1):
            if path[:length] in self.keys:
                return self.keys[path[:length]]
        return Span(self.file, 1, 1, 1, 2)

    def located(self, finding: Diagnostic) -> Diagnostic:
        """Return the finding with secrets hidden; a finding without a span gets the span of its path."""
        span = finding.span or self.span(finding.path, key=finding.code in _ABOUT_KEYS)
        message, label, help = (masked(text, self.secrets) for text in (finding.message, finding.label, finding.help))
        return replace(finding, span=span, message=message, label=label, help=help)

    def ignores(self, finding: Diagnostic) -> bool:
        """Return True if a comment such as ``# partool: ignore[PT214]`` on a warning's line silences this warning."""
        span = finding.span
        if finding.severity != "warning" or span is None or span.file != self.file or span.line > len(self.lines):
            return False
        match = _IGNORE.search(self.lines[span.line - 1])
        return match is not None and finding.code in re.split(r"[,\s]+", match[1])

    def attach(self, findings: Iterable[Diagnostic]) -> list[Diagnostic]:
        """Return findings with their spans; duplicates and silenced findings are left out."""
        located = [self.located(finding) for finding in dict.fromkeys(findings)]
        return [finding for finding in located if not self.ignores(finding)]
