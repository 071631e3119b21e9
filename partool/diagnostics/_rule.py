"""What documents one rule."""

from __future__ import annotations

from dataclasses import dataclass
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
