"""A spec's text, and where its keys and values stand in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from partool.diagnostics.record import Diagnostic, Span

SpecPath = tuple[str | int, ...]

_IGNORE = re.compile(r"#\s*partool:\s*ignore\[([A-Z0-9,\s]+)\]")
_ABOUT_KEYS = ("PT008", "PT101", "PT221", "PT222", "PT525")


@dataclass(slots=True)
class Source:
    """A text with the span of every key and value, by its path in the spec."""

    file: str
    text: str = ""
    keys: dict[SpecPath, Span] = field(default_factory=dict)
    values: dict[SpecPath, Span] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """The text's lines."""
        return self.text.split("\n")

    @property
    def texts(self) -> Mapping[str, list[str]]:
        """Lines by file name, for the renderers; empty where nothing could be read."""
        return {self.file: self.lines} if self.text else {}

    def span(self, path: SpecPath, *, key: bool = False) -> Span:
        """Return where a value (or its key) stands; for what is not in the file, the nearest section's key.

        A value over several lines is shown by its key.
        """
        if path in self.values:
            span = self.values[path]
            return self.keys.get(path, span) if key or span.line != span.end_line else span
        for length in range(len(path) - 1, 0, -1):
            if path[:length] in self.keys:
                return self.keys[path[:length]]
        return Span(self.file, 1, 1, 1, 2)

    def located(self, finding: Diagnostic) -> Diagnostic:
        """Return the finding with the span of its path, unless it has one."""
        if finding.span is not None:
            return finding
        return replace(finding, span=self.span(finding.path, key=finding.code in _ABOUT_KEYS))

    def ignores(self, finding: Diagnostic) -> bool:
        """Return True for a warning that a comment on its line silences: ``# partool: ignore[PT214]``."""
        span = finding.span
        if finding.severity != "warning" or span is None or span.file != self.file or span.line > len(self.lines):
            return False
        match = _IGNORE.search(self.lines[span.line - 1])
        return match is not None and finding.code in re.split(r"[,\s]+", match[1])

    def attach(self, findings: Iterable[Diagnostic]) -> list[Diagnostic]:
        """Return findings with their spans, each once, less the silenced ones."""
        located = [self.located(finding) for finding in dict.fromkeys(findings)]
        return [finding for finding in located if not self.ignores(finding)]
