"""Findings (problem, place in the file, fix), and the documentation of rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """Documentation of one rule code; the check itself is in the module of the section that it checks."""

    code: str
    title: str
    """Title in one line."""
    reason: str
    """Reason for the rule."""
    bad: str
    """Example that breaks the rule: a whole spec, or a command."""
    good: str
    """The corrected example."""
    example: Literal["spec", "command"] = "spec"
    """Kind of ``bad`` and ``good``: whole specs, which a test plans, or commands, which are only shown."""


def command_rule(code: str, title: str, reason: str, bad: str, good: str) -> Rule:
    """Return a rule whose examples are commands, or text that no test plans."""
    return Rule(code, title, reason, bad, good, "command")


class CodedError(Exception):
    """What went wrong, with the code of its rule, and what to do about it."""

    def __init__(self, code: str, message: str, help: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.help = code, message, help


BASE = """\
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: cpu, per_node: 1}
data: python-stdlib
"""
"""A valid spec, to which examples add one or two lines."""


Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a source file; lines and columns count from 1, the end column is exclusive."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, slots=True)
class Label:
    """A span with a remark, for a second place that a finding concerns ("tensor is set here")."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A finding; ``path`` is its place in the spec (``("parallel", "tensor")``), ``span`` its place in the file."""

    code: str
    """Rule code, such as PT203."""
    message: str
    """Problem, with the numbers that conflict."""
    severity: Severity = "error"
    path: tuple[str | int, ...] = ()
    span: Span | None = None
    label: str = ""
    """Remark next to the caret."""
    help: str = ""
    """Smallest change that resolves the finding."""
    related: tuple[Label, ...] = field(default=())
