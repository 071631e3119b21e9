"""The rules' documentation: what each code means, with a spec that breaks it and one that does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Documentation of one rule code; the check itself stands beside what it checks."""

    code: str
    title: str
    """One line."""
    reason: str
    """Why this is a rule."""
    bad: str
    """YAML that breaks it (whole file)."""
    good: str
    """The same, mended."""
