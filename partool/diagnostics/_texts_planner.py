"""Texts of the planner's rules: those that need the resolved model or hardware, memory, time, and what can run."""

from __future__ import annotations

from partool.diagnostics._rule import Rule

RULES: tuple[Rule, ...] = ()
