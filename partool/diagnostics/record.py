"""One finding: what is wrong, where, why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """Documentation of one rule code; the check itself stands beside what it checks."""

    code: str
    title: str
    """One line."""
    reason: str
    """Why this is a rule."""
    bad: str
    """What breaks it: a whole spec, or a command."""
    good: str
    """The same, mended."""
    example: Literal["spec", "command"] = "spec"
    """Whether ``bad`` and ``good`` are whole specs, which a test plans, or commands to read."""


BASE = """\
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: cpu, per_node: 1}
data: python-stdlib
"""
"""A spec that plans; examples add one or two lines to it."""


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
