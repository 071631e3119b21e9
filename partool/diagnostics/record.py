"""One finding: what is wrong, where, why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a source file; lines and columns count from 1, the end column is exclusive."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, slots=True)
class Label:
    """A span with a remark, for a second place that matters ("tensor is set here")."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A finding; ``path`` is its place in the spec (``("parallel", "tensor")``), ``span`` its place in the file."""

    code: str
    """Rule code, such as PT203."""
    message: str
    """What is wrong, with the numbers that conflict."""
    severity: Severity = "error"
    path: tuple[str | int, ...] = ()
    span: Span | None = None
    label: str = ""
    """Remark beside the caret."""
    help: str = ""
    """The nearest thing that works."""
    related: tuple[Label, ...] = field(default=())
