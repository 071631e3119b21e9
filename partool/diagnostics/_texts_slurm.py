"""Rules of Slurm jobs (541-560)."""

from __future__ import annotations

from partool.diagnostics._rule import Rule


def _rule(code: str, title: str, reason: str, bad: str, good: str) -> Rule:
    return Rule(code, title, reason, bad, good, "command")


RULES: tuple[Rule, ...] = ()
