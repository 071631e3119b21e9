"""Where the values of a spec stand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace, replace

from partool.diagnostics.record import Diagnostic, Span

OVERRIDES = "<--set>"
"""Stands for the file in findings about overrides."""
_IGNORE = re.compile(r"#\s*partool:\s*ignore\[([A-Z0-9,\s]+)\]")
_KEYED = {"PT101", "PT004"}


@dataclass(slots=True)
class Source:
    """A spec's file: its lines, and the span of every key and value by path."""

    file: str
    lines: Sequence[str] = ()
    keys: dict[tuple[str | int, ...], Span] = field(default_factory=dict)
    values: dict[tuple[str | int, ...], Span] = field(default_factory=dict)
    overrides: Sequence[str] = ()

    @property
    def texts(self) -> Mapping[str, Sequence[str]]:
        """Lines by file name, for the renderers."""
        return {self.file: self.lines, OVERRIDES: self.overrides}

    def span(self, path: tuple[str | int, ...], *, key: bool = False) -> Span | None:
        """Return where a path's value (or key) stands; of what is not in the file, its nearest section's key."""
        if path in self.values:
            span = self.values[path]
            in_one_line = span.line == span.end_line
            return self.keys.get(path, span) if key or not in_one_line else span
        while path:
            path = path[:-1]
            if path in self.keys:
                return self.keys[path]
        return Span(self.file, 1, 1, 1, 2)

    def attach(self, diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
        """Return the findings with spans, in the order of the file, less the warnings that a comment there silences."""
        placed = [
            d if d.span else replace(d, span=self.span(d.path, key=d.code in _KEYED))
            for d in dict.fromkeys(diagnostics)
        ]
        kept = [d for d in placed if not (d.severity == "warning" and self._ignored(d))]
        return sorted(kept, key=lambda d: (d.span.file, d.span.line, d.span.column) if d.span else ("", 0, 0))

    def _ignored(self, diagnostic: Diagnostic) -> bool:
        span = diagnostic.span
        if span is None or span.file != self.file or not 0 < span.line <= len(self.lines):
            return False
        match = _IGNORE.search(self.lines[span.line - 1])
        return match is not None and diagnostic.code in re.split(r"[,\s]+", match[1])
